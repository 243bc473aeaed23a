"""The kernels of im2col and col2im, compiled for the host, beyond what an int32 counts.

Their arrays are mostly zeros, which take no memory, and only the last elements are computed.
"""

import ctypes
import itertools
import types

import numpy as np
import pytest
from chainer.backends import cuda
from chainer.utils import conv, conv_nd
from host_compiler import library

pytestmark = pytest.mark.mpi_skip

N = 3000  # elements that are computed

SOURCE = r'''
typedef signed char T;
typedef long long ptrdiff_t;

struct Raw {
    const T* data;
    ptrdiff_t size;
    bool* outside;
    T operator[](ptrdiff_t i) const {
        if (i >= 0 && i < size) return data[i];
        *outside = true;
        return 0;
    }
};

extern "C" bool run(ptrdiff_t begin, ptrdiff_t end, const T* data, ptrdiff_t size,
                    const int* sizes, T* results) {
    bool outside = false;
    const Raw %(raw)s = {data, size, &outside};
    %(sizes)s
    for (ptrdiff_t i = begin; i < end; ++i) {
        T& %(out)s = results[i - begin];
        %(operation)s
    }
    return outside;
}
'''


class Large(np.ndarray):
    """Stands in for an array on a device."""

    def reduced_view(self):
        return self


def large(shape):
    """Zeros, but at the end."""
    x = np.zeros(shape, np.int8)
    x.ravel()[-10**7:] = np.arange(10**7) * 7 % 11
    return x.view(Large)


@pytest.fixture
def last_of(monkeypatch):
    """Return what the kernel of a function computes last, and the indices of that."""
    kernels = []

    def elementwise(in_params, out_params, operation, name):
        def call(raw, *sizes_and_out):
            kernels.append((in_params, out_params, operation, raw, sizes_and_out))
        return call

    monkeypatch.setattr(cuda, 'elementwise', elementwise)
    monkeypatch.setattr(cuda, 'cupy', types.SimpleNamespace(
        empty=lambda shape, dtype: types.SimpleNamespace(shape=shape)), raising=False)

    def last_of(function, x, *args, **kwargs):
        function(x, *args, **kwargs)
        in_params, out_params, operation, raw, (*sizes, out) = kernels.pop()
        raw_name, *names = (param.split()[-1] for param in in_params.split(','))
        source = SOURCE % {
            'raw': raw_name, 'out': out_params.split()[-1], 'operation': operation,
            'sizes': ''.join(f'const int {name} = sizes[{i}];' for i, name in enumerate(names))}
        # A device wraps what does not fit an int.
        run = library(source, '-fwrapv').run
        run.restype = ctypes.c_bool
        end = int(np.prod(out.shape, dtype=np.int64))
        results = np.full(N, 77, np.int8)
        outside = run(
            ctypes.c_longlong(end - N), ctypes.c_longlong(end), ctypes.c_void_p(raw.ctypes.data),
            ctypes.c_longlong(raw.size), (ctypes.c_int * len(sizes))(*sizes),
            ctypes.c_void_p(results.ctypes.data))
        assert not outside
        return results, np.unravel_index(np.arange(end - N, end), out.shape)

    return last_of


# Images and sizes of square windows: more than 2**31 elements of the image, or of the columns of
# one channel. Stride 1, no padding.
IMAGES = [((1, 2150, 1000, 1000), 1), ((2, 1, 16000, 16000), 3)]
VOLUMES = [((1, 22, 100, 1000, 1000), 1), ((1, 1, 450, 450, 450), 3)]


@pytest.mark.sample(3)
@pytest.mark.parametrize('shape, k, is_nd', [
    *[(*image, is_nd) for image in IMAGES for is_nd in (False, True)],
    *[(*volume, True) for volume in VOLUMES]])
def test_im2col(last_of, shape, k, is_nd):
    image, ndim = large(shape), len(shape) - 2
    if is_nd:
        results, at = last_of(conv_nd.im2col_nd_gpu, image, (k,) * ndim, (1,) * ndim, (0,) * ndim)
    else:
        results, at = last_of(conv.im2col_gpu, image, k, k, 1, 1, 0, 0)
    n, c, windows, outs = at[0], at[1], at[2:2 + ndim], at[2 + ndim:]
    places = [window + out for window, out in zip(windows, outs, strict=True)]
    np.testing.assert_array_equal(results, image[(n, c, *places)])
    assert len(set(results)) > 1


# Images whose columns have more than 2**31 elements.
@pytest.mark.parametrize('shape, is_nd', [
    ((2, 120, 1000, 1000), False), ((2, 120, 1000, 1000), True), ((1, 81, 100, 100, 100), True)])
def test_col2im(last_of, shape, is_nd):
    dims, k = shape[2:], 3
    ndim = len(dims)
    columns = large((*shape[:2], *(k,) * ndim, *dims))
    if is_nd:
        results, at = last_of(conv_nd.col2im_nd_gpu, columns, (1,) * ndim, (1,) * ndim, dims)
    else:
        results, at = last_of(conv.col2im_gpu, columns, 1, 1, 1, 1, *dims)
    n, c, *at = at
    expected = np.zeros(N, np.int8)
    for window in itertools.product(range(k), repeat=ndim):
        places = [x + 1 - w for x, w in zip(at, window, strict=True)]
        inside = np.logical_and.reduce(
            [(place >= 0) & (place < d) for place, d in zip(places, dims, strict=True)])
        expected += columns[(n, c, *window, *(place * inside for place in places))] * inside
    np.testing.assert_array_equal(results, expected)
    assert len(set(results)) > 1
