"""Conversion of arrays to MPI buffers and back."""

import chainer
import numpy as np
import pytest
from each_case import each_case
from shared_fixtures import dtypes_and_kinds, make_array

from chainermn._transport import array_buffers

pytestmark = pytest.mark.mpi_skip


@each_case('dtype, kind', dtypes_and_kinds)
def test_checked(dtype, kind):
    x = make_array(dtype, kind, 3)
    y = array_buffers.checked(x)
    assert isinstance(y, np.ndarray)
    assert y.dtype == x.dtype.newbyteorder('=')
    assert y.dtype.isnative
    np.testing.assert_array_equal(y, x)
    if isinstance(x, np.ndarray) and x.dtype.isnative:
        assert y is x


@pytest.mark.parametrize('bad, text', [
    (None, 'got None;'), (1, 'got int'), ([1.], 'got list'), ((np.zeros(1),), 'got tuple'),
    (chainer.Variable(np.zeros(1, 'f4')), r'got a chainer.Variable; pass its .array'),
    (chainer.Parameter(np.zeros(1, 'f4')), 'chainermn.functions'),
    (np.array(['a']), 'dtype <U1 cannot be exchanged; use one of bool, int8'),
    (np.array([None]), 'dtype object'), (np.zeros(1, 'M8[s]'), r'dtype datetime64\[s\]'),
    (np.zeros(1, np.longdouble), 'dtype (float128|longdouble|float96)'),
    (np.ma.zeros(1), 'mask'),
    (memoryview(b'x'), 'got memoryview'), (np.float64, 'got type'),
])
def test_unsupported_arrays(bad, text):
    with pytest.raises(TypeError, match=text):
        array_buffers.checked(bad)


@each_case('dtype, kind', dtypes_and_kinds)
def test_buffers(dtype, kind):
    """Round trip through a flat buffer in C order."""
    x = array_buffers.checked(make_array(dtype, kind, 3))
    buffer = array_buffers.to_buffer(x)
    assert buffer.ndim == 1
    assert buffer.flags.c_contiguous
    np.testing.assert_array_equal(buffer, x.flatten())
    assert np.may_share_memory(buffer, x) == (x.flags.c_contiguous and x.size > 0)
    received = array_buffers.new_buffer(x.shape, x.dtype, device=False)
    assert (received.dtype, received.shape) == (x.dtype, (x.size,))
    assert array_buffers.raw(received).nbytes == x.nbytes
    array_buffers.raw(received)[...] = array_buffers.raw(buffer)
    y = array_buffers.from_buffer(received, x.shape, device=False)
    assert y.shape == x.shape
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize('root, error', [
    (None, TypeError), (1., TypeError), ('1', TypeError), (True, TypeError),
    (-1, ValueError), (3, ValueError), (2**64, ValueError)])
def test_checked_root(root, error):
    with pytest.raises(error, match='root must be'):
        array_buffers.checked_root(root, 3)
    assert array_buffers.checked_root(np.int16(2), 3) == 2
    assert type(array_buffers.checked_root(np.int16(2), 3)) is int


def test_summed_in():
    for dtype in ('float32', 'float64', 'int8', 'bool', 'complex64'):
        assert array_buffers.summed_in(np.dtype(dtype)) == dtype
    assert array_buffers.summed_in(np.dtype('float16')) == np.float32


def test_cuda_aware(monkeypatch):
    monkeypatch.delenv('CHAINERMN_CUDA_AWARE', raising=False)
    assert array_buffers.cuda_aware() is False
    monkeypatch.setenv('CHAINERMN_CUDA_AWARE', '1')
    assert array_buffers.cuda_aware() is True
    monkeypatch.setenv('CHAINERMN_CUDA_AWARE', '0')
    assert array_buffers.cuda_aware() is False
