"""The kernels that copy all gradients into or out of one buffer."""

import itertools

import numpy as np
import pytest

from chainermn._transport import batched_copy

pytestmark = pytest.mark.gpu

LENGTH = batched_copy.LENGTH
SHAPES = [(0,), (), (3, 5), (LENGTH - 1,), (LENGTH,), (LENGTH + 1,), (2, LENGTH), (1,)]


@pytest.fixture(params=['float16', 'float32', 'float64'])
def dtype(request):
    """The dtype of the buffer."""
    return np.dtype(request.param)


def halves(size):
    """Numbers that every dtype represents exactly; neighbors differ."""
    return np.arange(size) % 1000 / 4 - 50


def arrays_of_all_kinds():
    """Arrays of all dtypes and shapes; some begin at a multiple of 16 bytes, some do not."""
    import cupy

    arrays = []
    for shape, dtype, shift in itertools.product(SHAPES, ['f2', 'f4', 'f8'], [0, 1]):
        size = int(np.prod(shape))
        array = cupy.empty(size + 1, dtype)[shift:shift + size].reshape(shape)
        array[...] = cupy.asarray(halves(size).reshape(shape))
        arrays.append(array)
    return arrays


def placed(arrays):
    return list(zip(itertools.accumulate((x.size for x in arrays), initial=0), arrays,
                    strict=False))


def scaled(x, dtype, scale):
    """Multiplied in the wider dtype of both, which is at least float32, and rounded once."""
    wide = np.result_type(x.dtype, dtype, 'f4').type
    return (x.astype(wide) * wide(scale)).astype(dtype)


@pytest.mark.parametrize('scale', [1., 1 / 3])
def test_pack(dtype, scale):
    import cupy

    arrays = arrays_of_all_kinds()
    buffer = cupy.empty(sum(x.size for x in arrays), dtype)
    assert batched_copy.pack(buffer, placed(arrays), scale) == []
    np.testing.assert_array_equal(
        buffer.get(), np.concatenate([scaled(x.get().ravel(), dtype, scale) for x in arrays]))


@pytest.mark.parametrize('scale', [1., 1 / 3])
def test_unpack(dtype, scale):
    import cupy

    arrays = arrays_of_all_kinds()
    x = halves(sum(x.size for x in arrays))[::-1].astype(dtype)
    assert batched_copy.unpack(cupy.asarray(x), placed(arrays), scale) == []
    for start, array in placed(arrays):
        np.testing.assert_array_equal(
            array.get().ravel(), scaled(x[start:start + array.size], array.dtype, scale))


@pytest.mark.parametrize('size', [1, 7, 8, 9, 2000, LENGTH - 3])
def test_nothing_else_is_written(dtype, size):
    import cupy

    array, buffer = cupy.full(size + 64, 5, 'f4'), cupy.full(size + 64, 7, dtype)
    batched_copy.pack(buffer, [(32, array[16:16 + size])], 1.)
    expected = np.full(size + 64, 7)
    expected[32:32 + size] = 5
    np.testing.assert_array_equal(buffer.get(), expected)
    array.fill(3)
    batched_copy.unpack(buffer, [(32, array[32:32 + size])], 1.)
    np.testing.assert_array_equal(array.get(), np.where(expected == 5, 5, 3))


def test_rounding(dtype):
    import cupy

    x = np.random.RandomState(0).standard_normal(1000).astype('f4')
    x[:4] = np.inf, -np.inf, np.nan, 1e30
    buffer = cupy.empty(1000, dtype)
    batched_copy.pack(buffer, [(0, cupy.asarray(x))], 1.)
    with np.errstate(over='ignore'):
        np.testing.assert_array_equal(buffer.get(), x.astype(dtype))


def test_arrays_that_are_not_copied():
    import cupy

    x = cupy.ones((3, 4), 'f')
    left = [(12, x.T), (24, cupy.ones(3, 'i'))]
    assert batched_copy.pack(cupy.empty(27, 'f'), [(0, x), *left], 1.) == left
    assert batched_copy.pack(cupy.empty(0, 'f'), [], 1.) == []


def test_two_streams_with_the_same_arrays():
    """Neither waits for the table that the other one uploads."""
    import cupy

    x = cupy.arange(777, dtype='f')
    buffers = cupy.zeros((2, 777), 'f')
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in buffers]
    for stream, buffer in zip(streams, buffers, strict=True):
        with stream:
            batched_copy.pack(buffer, [(0, x)], 1.)
    with streams[1]:
        np.testing.assert_array_equal(buffers[1].get(), np.arange(777))
    streams[0].synchronize()


def test_tables_are_cached_within_the_limit():
    tables = batched_copy.Tables(2000)
    a, b, c, d = (((16 * n, 0, 10, 4),) for n in range(4))
    for n, key in enumerate([a, b, c]):
        assert tables.get(0, 1, key)[0] == 1
        assert tables.n_made == n + 1
    table = tables.get(0, 1, a)[1]
    assert table.get().view(batched_copy.PIECE).tolist() == [(0, 0, 10, 4)]
    tables.get(0, 1, d)  # now b was used longest ago
    assert tables.n_made == 4
    for key in (a, c, d):
        tables.get(0, 1, key)
    assert tables.n_made == 4
    tables.get(0, 1, b)
    assert tables.n_made == 5


def test_table_larger_than_the_limit():
    tables = batched_copy.Tables(2000)
    large = ((0, 0, 1000 * LENGTH, 4),)
    for _ in range(2):
        assert tables.get(0, 1, large)[0] == 1000
    assert tables.n_made == 1
