"""The old names of _memory_utility, on host arrays."""


import chainer
import numpy as np
import pytest
from mpi4py import MPI

from chainermn.communicators import _memory_utility


@pytest.fixture
def model():
    model = chainer.Chain(l0=chainer.links.Linear(3, 4), l1=chainer.links.Linear(4, 2),
                          l2=chainer.links.Linear(None, 2))
    for number, param in enumerate(model.params()):
        if param.array is not None:
            param.grad = np.full_like(param.array, number)
    model.l0.b.grad = None
    return model


def names_of(model, params):
    paths = {id(param): path for path, param in model.namedparams()}
    return [paths[id(param)] for param in params]


def test_extract_params(model):
    everything = ['/l0/W', '/l0/b', '/l1/W', '/l1/b', '/l2/b']
    assert names_of(model, _memory_utility.extract_params_set_data(model)) == everything
    params = _memory_utility.extract_params_set_grad(model, False)
    assert names_of(model, params) == ['/l0/W', '/l1/W', '/l1/b', '/l2/b']
    params = _memory_utility.extract_params_set_grad(model, True)
    assert names_of(model, params) == everything
    assert model.l0.b.grad is None


def test_count_grad_elements(model):
    params = _memory_utility.extract_params_set_data(model)
    assert _memory_utility.count_grad_elements(params, False) == 24
    assert _memory_utility.count_grad_elements(params, True) == 28


class Buffer:
    """A DeviceMemory on the host."""

    def __init__(self, size):
        self.memory = np.zeros(size, np.uint8)

    def array(self, shape, offset=0, dtype=np.float32):
        return self.memory[offset:].view(dtype)[:shape[0]]


@pytest.mark.parametrize('zero_fill', [False, True])
@pytest.mark.parametrize('dtype', [np.float16, 'float32', np.dtype(np.float64)])
def test_pack_and_unpack(model, zero_fill, dtype):
    params = _memory_utility.extract_params_set_grad(model, zero_fill)
    buffer = Buffer(800)
    _memory_utility.pack_params(params, 'grad', buffer, dtype, zero_fill)
    packed = np.concatenate([param.grad.ravel() for param in params])
    assert len(packed) == (28 if zero_fill else 24)
    np.testing.assert_array_equal(buffer.array(packed.shape, dtype=dtype), packed)
    buffer.array(packed.shape, dtype=dtype)[...] *= 2
    _memory_utility.unpack_params(params, 'grad', buffer, dtype, zero_fill)
    np.testing.assert_array_equal(
        np.concatenate([param.grad.ravel() for param in params]), packed * 2)


def test_array_to_buffer_object():
    x = np.ones((4, 3), 'f')
    assert _memory_utility.array_to_buffer_object(x) is x
    assert _memory_utility.array_to_buffer_object(x, MPI.INT) is x
    for strided in (x[:, 1], np.asfortranarray(x)):
        result = _memory_utility.array_to_buffer_object(strided)
        assert result.flags.c_contiguous
        np.testing.assert_array_equal(result, strided)


@pytest.mark.parametrize('name', ['DeviceMemory', 'HostPinnedMemory'])
def test_without_cupy(monkeypatch, name):
    monkeypatch.setattr(chainer.backends.cuda, 'available', False)
    with pytest.raises(RuntimeError, match=f'{name} cannot be used: CuPy is not available'):
        getattr(_memory_utility, name)()
