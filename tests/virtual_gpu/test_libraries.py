"""The stand-ins compute what CUDA's libraries compute, as CuPy calls them."""

import numpy as np
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.mpi_skip]

CASES = {
    'dot': lambda xp, a, b: a @ b,
    'dot of float16': lambda xp, a, b: (a.astype('e') @ b.astype('e')).astype('f'),
    'batched dot': lambda xp, a, b: xp.matmul(xp.stack([a, b]), xp.stack([b, a])),
    'tensordot': lambda xp, a, b: xp.tensordot(a, b, axes=2),
    'inverse': lambda xp, a, b: xp.linalg.inv(a),
    'inverses': lambda xp, a, b: xp.linalg.inv(xp.stack([a, b])),
    'determinant': lambda xp, a, b: xp.linalg.det(a),
    'solve': lambda xp, a, b: xp.linalg.solve(a, b),
    'cholesky': lambda xp, a, b: xp.linalg.cholesky(a @ a.T + xp.eye(4)),
    'singular values': lambda xp, a, b: xp.linalg.svd(a, compute_uv=False),
    'eigenvalues': lambda xp, a, b: xp.linalg.eigh(a + a.T)[0],
    'fft': lambda xp, a, b: xp.fft.fft(a),
    'inverse fft': lambda xp, a, b: xp.fft.ifft(a[:, :3], axis=0),
    'real fft': lambda xp, a, b: xp.fft.rfft(a),
    'inverse real fft': lambda xp, a, b: xp.fft.irfft(a, 5),
    'fft of two dimensions': lambda xp, a, b: xp.fft.fft2(xp.stack([a, b])),
    'real fft of two dimensions': lambda xp, a, b: xp.fft.rfft2(a),
    'sort': lambda xp, a, b: xp.sort(a, axis=0),
    'argsort': lambda xp, a, b: xp.argsort(a),
    'lexsort': lambda xp, a, b: xp.lexsort(xp.stack([a[0] > 0, b[0]])),
    'sum': lambda xp, a, b: a.sum(axis=0),
    'cumsum': lambda xp, a, b: xp.cumsum(a),
    'selection': lambda xp, a, b: a[a > 0],
    'complex numbers': lambda xp, a, b: xp.exp(1j * a) / (a + 1j * b),
}


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@pytest.mark.parametrize('name', CASES)
def test_as_numpy(virtual_gpu, name, dtype):
    random = np.random.RandomState(0)
    a, b = (random.standard_normal((4, 4)).astype(dtype) for _ in range(2))
    expected = CASES[name](np, a, b)
    found = CASES[name](virtual_gpu, virtual_gpu.asarray(a), virtual_gpu.asarray(b)).get()
    tolerance = 1e-2 if 'float16' in name else 1e-4 if dtype == 'float32' else 1e-10
    np.testing.assert_allclose(found, expected, tolerance, tolerance)


def test_kernels_with_shared_memory(virtual_gpu):
    kernel = virtual_gpu.RawKernel(r'''
extern "C" __global__ void reversed(const float* x, float* y) {
    extern __shared__ float part[];
    __shared__ float total;
    int i = threadIdx.x, at = blockIdx.x * blockDim.x + i;
    part[i] = x[at];
    if (i == 0) total = 0;
    __syncthreads();
    atomicAdd(&total, part[i]);
    __syncthreads();
    y[at] = part[blockDim.x - 1 - i] + total;
}''', 'reversed')
    x = np.arange(256, dtype='f')
    y = virtual_gpu.empty(256, 'f')
    kernel((4,), (64,), (virtual_gpu.asarray(x), y), shared_mem=64 * 4)
    rows = x.reshape(4, 64)
    np.testing.assert_allclose(y.get(), (rows[:, ::-1] + rows.sum(1, keepdims=True)).reshape(-1))


def test_kernels_with_shuffles(virtual_gpu):
    kernel = virtual_gpu.RawKernel(r'''
extern "C" __global__ void sum_of_warp(int* y) {
    int sum = threadIdx.x;
    for (int step = 16; step; step /= 2) sum += __shfl_down_sync(0xffffffff, sum, step);
    y[threadIdx.x] = __shfl_sync(0xffffffff, sum, 0);
}''', 'sum_of_warp')
    y = virtual_gpu.empty(64, 'i')
    kernel((1,), (64,), (y,))
    np.testing.assert_array_equal(y.get(), [sum(range(32))] * 32 + [sum(range(32, 64))] * 32)


def test_templates(virtual_gpu):
    module = virtual_gpu.RawModule(
        code='template<class T> __global__ void add(T* p) { p[threadIdx.x] += T(1); }',
        name_expressions=['add<float>', 'add<double>'], options=('-std=c++17',))
    x = virtual_gpu.zeros(4)
    module.get_function('add<double>')((1,), (4,), (x,))
    assert (x == 1).all()


def test_constant_memory(virtual_gpu):
    module = virtual_gpu.RawModule(code='''
extern "C" { __constant__ int table[4]; }
extern "C" __global__ void read(int* y) { y[threadIdx.x] = table[threadIdx.x]; }''')
    table = virtual_gpu.ndarray((4,), 'i', module.get_global('table'))
    table[:] = virtual_gpu.arange(4)
    y = virtual_gpu.empty(4, 'i')
    module.get_function('read')((1,), (4,), (y,))
    np.testing.assert_array_equal(y.get(), range(4))


def test_random_numbers(virtual_gpu):
    x = virtual_gpu.random.rand(1000)
    assert float(x.min()) >= 0 and float(x.max()) < 1 and abs(float(x.mean()) - .5) < .05
    assert abs(float(virtual_gpu.random.randn(1000).std()) - 1) < .1


def test_compiled_device_code_raises_an_error(virtual_gpu):
    with pytest.raises(NotImplementedError):
        virtual_gpu.random.default_rng(0)
