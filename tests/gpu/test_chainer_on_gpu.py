"""Chainer's own networks on a GPU: forward, backward and three updates, as on the CPU.

Each in float32, float16 and mixed16. The CPU computes the same network, from the same parameters,
in the same dtype; so what is compared is Chainer's GPU code with Chainer's CPU code.
"""

import copy
import warnings

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.utils import conv

from chainer_compat.pytorch import dispatch

pytestmark = [pytest.mark.gpu, pytest.mark.mpi_skip]

TOLERANCE = {'float32': 1e-4, 'float16': 2e-2, 'mixed16': 2e-2}
DTYPES = {'float32': np.dtype('f'), 'float16': np.dtype('e'), 'mixed16': chainer.mixed16}


def close(a, b, tolerance, name=''):
    a, b = chainer.backends.cuda.to_cpu(a), chainer.backends.cuda.to_cpu(b)
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    np.testing.assert_allclose(a.astype('d'), b.astype('d'), tolerance, tolerance, err_msg=name)


@pytest.fixture(params=DTYPES)
def dtype(request):
    with chainer.using_config('dtype', DTYPES[request.param]):
        yield request.param


@pytest.fixture
def gpu(device):
    return chainer.get_device(f'@cupy:{device.id}')


def test_the_first_convolution_says_why_it_is_slow(gpu, monkeypatch):
    monkeypatch.setattr(dispatch, '_has_advised', False)
    x, w = gpu.xp.ones((2, 3, 5, 5), 'f'), gpu.xp.ones((4, 3, 3, 3), 'f')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        with chainer.using_config('use_torch', 'never'):
            expected = F.convolution_2d(x, w).array
        assert not caught
        found = [F.convolution_2d(x, w).array for _ in range(2)]
    reason = dispatch.why_not_on_gpu(gpu.device.id)
    assert [str(each.message).lower() for each in caught] == [reason.lower()] * bool(reason)
    assert not reason or 'Install a PyTorch build for this version of CUDA' in reason
    for each in found:
        close(each, expected, 1e-4)


def test_dropout(gpu, dtype):
    x = chainer.Variable(gpu.xp.ones((100, 100), chainer.get_dtype(DTYPES[dtype])))
    y = F.dropout(x, .25)
    F.sum(y).backward()
    kept = y.array != 0
    assert .7 < float(kept.mean()) < .8
    close(x.grad, y.array, 1e-3)
    close(y.array[kept], gpu.xp.full_like(y.array[kept], 1 / .75), 1e-3)


def test_second_derivative_of_lstm(gpu):
    """It goes through cupy.fuse."""
    grads = []
    random = np.random.RandomState(0)
    c, x = (random.standard_normal(shape).astype('f') for shape in [(2, 3), (2, 12)])
    for send in (lambda a: a, gpu.send):
        inputs = [chainer.Variable(send(c)), chainer.Variable(send(x))]
        first = chainer.grad(list(F.lstm(*inputs)), inputs, enable_double_backprop=True)
        F.sum(first[0] * first[0] + F.sum(first[1] * first[1])).backward()
        grads.append([v.grad for v in inputs])
    for here, there in zip(*grads, strict=True):
        close(there, here, 1e-4)


@pytest.mark.parametrize('dtype', ['uint8', 'int32', 'float16', 'float32'])
@pytest.mark.parametrize('padding', [0, -1])
def test_pad_sequence(gpu, dtype, padding):
    xs = [np.arange(6).reshape(3, 2).astype(dtype), np.ones((1, 2), dtype)]
    y = F.pad_sequence([gpu.send(x) for x in xs], padding=padding)
    close(y.array, F.pad_sequence(xs, padding=padding).array, 0)


@pytest.mark.limit(300)
def test_large_columns(gpu):
    """More than 2**31 of them; of all but the last image the gradient is zero."""
    shape = (2, 120, 1000, 1000)
    if gpu.device.mem_info[0] < 12e9:
        pytest.skip('needs 12 GB')
    columns = gpu.xp.zeros((*shape[:2], 3, 3, *shape[2:]), 'e')
    last = np.random.RandomState(0).standard_normal(columns.shape[2:]).astype('e')
    columns[-1, -1] = gpu.send(last)
    image = conv.col2im_gpu(columns, 1, 1, 1, 1, *shape[2:])
    del columns
    expected = conv.col2im_cpu(last[None, None].astype('f'), 1, 1, 1, 1, *shape[2:])
    np.testing.assert_allclose(image[-1, -1].get(), expected[0, 0], 2e-2, 2e-2)
    assert not image[:-1].any() and not image[-1, :-1].any()
    del image
    image = gpu.xp.zeros((1, 2150, 1000, 1000), 'i1')
    image[-1, -1, -1] = 1
    columns = conv.im2col_gpu(image, 1, 1, 1, 1, 0, 0)
    assert (columns[-1, -1, 0, 0, -1] == 1).all()
    assert int(columns[-1, -1].sum()) == 1000


@pytest.mark.parametrize('dtype', ['float16', 'float32'])
def test_binary_hierarchical_softmax(gpu, dtype):
    with chainer.using_config('dtype', np.dtype(dtype)):
        np.random.seed(0)
        net = L.BinaryHierarchicalSoftmax(3, ((0, 1), (2, 3)))
        x, t = np.random.standard_normal((4, 3)).astype(dtype), np.arange(4, dtype='i')
        there = copy.deepcopy(net)
        there.to_device(gpu)
        grads = []
        for each, send in [(net, lambda a: a), (there, gpu.send)]:
            each.cleargrads()
            each(chainer.Variable(send(x)), send(t)).backward()
            grads.append(each.W.grad)
        close(*grads, TOLERANCE[dtype])


@pytest.mark.parametrize('dtype', ['float16', 'float32'])
def test_negative_sampling(gpu, dtype):
    random = np.random.RandomState(0)
    x, w = (random.standard_normal(shape).astype(dtype) for shape in [(4, 3), (5, 3)])
    t, samples = np.array([1, 4, -1, 0], 'i'), random.randint(0, 5, (4, 3)).astype('i')
    grads = []
    for send in (lambda a: a, gpu.send):
        inputs = [chainer.Variable(send(a)) for a in (x, w)]
        drawn = send(samples)
        F.negative_sampling(
            inputs[0], send(t), inputs[1], lambda shape, drawn=drawn: drawn, 2).backward()
        grads.append([v.grad for v in inputs])
    for here, there in zip(*grads, strict=True):
        close(there, here, TOLERANCE[dtype])

