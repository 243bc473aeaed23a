"""Clips gradients on a GPU and finds non-finite ones, with one or two launches for all."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from chainer_compat.updates import elementwise
from chainer_compat.updates.elementwise import C_TYPES, THREADS

if TYPE_CHECKING:
    from chainer_compat.updates.elementwise import Array

_SOURCE = f'''
#include <cupy/carray.cuh>
#include <cupy/float16.cuh>
struct Piece {{ long long start; int array; int size; }};
const int THREADS = {THREADS};

// The sum over the threads of a block, in a fixed order.
__device__ double sum_of_block(double x) {{
  __shared__ double sums[THREADS];
  sums[threadIdx.x] = x;
  for (int n = THREADS / 2; n; n /= 2) {{
    __syncthreads();
    if (threadIdx.x < n) sums[threadIdx.x] += sums[threadIdx.x + n];
  }}
  __syncthreads();
  return sums[0];
}}

// The block that ends last adds the sums of all blocks.
template <typename T>
__device__ void rate(const Piece* pieces, void* const* grads, double* sums, unsigned int* n_done,
                     double threshold, double* rate) {{
  const Piece piece = pieces[blockIdx.x];
  const T* grad = (const T*)grads[piece.array] + piece.start;
  double sum = 0;
  #pragma unroll 4
  for (int i = threadIdx.x; i < piece.size; i += THREADS) sum += (double)grad[i] * (double)grad[i];
  sum = sum_of_block(sum);
  __shared__ bool is_last;
  if (threadIdx.x == 0) {{
    sums[blockIdx.x] = sum;
    __threadfence();
    is_last = atomicInc(n_done, gridDim.x - 1) == gridDim.x - 1;
  }}
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  sum = 0;
  for (int i = threadIdx.x; i < gridDim.x; i += THREADS) sum += ((volatile double*)sums)[i];
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) *rate = threshold / sqrt(sum);
}}

template <typename T>
__device__ void scale(const Piece* pieces, void* const* grads, const double* rate) {{
  const double factor = *rate;
  if (factor >= 1) return;
  const Piece piece = pieces[blockIdx.x];
  T* grad = (T*)grads[piece.array] + piece.start;
  #pragma unroll 4
  for (int i = threadIdx.x; i < piece.size; i += THREADS) grad[i] = (T)((double)grad[i] * factor);
}}

template <typename T>
__device__ void find(const Piece* pieces, void* const* grads, bool* found) {{
  const Piece piece = pieces[blockIdx.x];
  const T* grad = (const T*)grads[piece.array] + piece.start;
  for (int i = threadIdx.x; i < piece.size; i += THREADS)
    if (!isfinite((double)grad[i])) found[piece.array] = true;
}}
''' + ''.join(f'''
extern "C" __global__ void rate_{name}(const Piece* pieces, void* const* grads, double* sums,
    unsigned int* n_done, double threshold, double* result) {{
  rate<{c_type}>(pieces, grads, sums, n_done, threshold, result);
}}
extern "C" __global__ void scale_{name}(const Piece* pieces, void* const* grads, double* rate) {{
  scale<{c_type}>(pieces, grads, rate);
}}
extern "C" __global__ void find_{name}(const Piece* pieces, void* const* grads, bool* found) {{
  find<{c_type}>(pieces, grads, found);
}}
''' for name, c_type in C_TYPES.items())


def clip(params: Iterable[Any], threshold: float) -> bool:
    """Scale gradients so that their L2 norm is at most ``threshold``, without synchronization.

    The sum of squares is computed in float64, in a fixed order.

    Returns:
        Whether the gradients were clipped. They must be contiguous arrays of the same dtype on the
        same GPU that do not overlap.
    """
    grads = [param.grad for param in params]
    if not _fit_one_launch(grads) or not isinstance(threshold, int | float):
        return False
    from chainer.backends.cuda import cupy

    with cupy.cuda.Device(grads[0].data.device_id):
        pieces, table = elementwise.tables([grads])
        if len(pieces):
            rate = cupy.empty(1, np.float64)
            sums = cupy.empty(len(pieces), np.float64)
            dtype = grads[0].dtype.name
            n_done = _counter(elementwise.current_place())
            _launch(f'rate_{dtype}', pieces, table, sums, n_done, np.float64(threshold), rate)
            _launch(f'scale_{dtype}', pieces, table, rate)
    return True


def are_finite(grads: Sequence[Array]) -> list[bool] | None:
    """Return whether each gradient is finite, after one synchronization.

    Returns:
        A flag for each gradient; ``None`` if the gradients are not contiguous arrays of the same
        dtype on the same GPU.
    """
    if not _fit_one_launch(grads):
        return None
    from chainer.backends.cuda import cupy

    with cupy.cuda.Device(grads[0].data.device_id):
        pieces, table = elementwise.tables([grads])
        found = cupy.zeros(len(grads), bool)
        if len(pieces):
            _launch(f'find_{grads[0].dtype.name}', pieces, table, found)
        return [not each for each in found.get()]


def _fit_one_launch(grads: Sequence[Any]) -> bool:
    from chainer.backends import cuda

    return bool(grads) and cuda.available and all(
        type(grad) is cuda.ndarray and grad.dtype == grads[0].dtype and grad.flags.c_contiguous
        and grad.data.device_id == grads[0].data.device_id for grad in grads
    ) and grads[0].dtype.name in C_TYPES and (
        len({elementwise.memory_of(grad) for grad in grads}) == len(grads))  # they do not overlap


def _launch(name: str, pieces: Array, *args: Any) -> None:
    _function(name)((len(pieces),), (THREADS,), (pieces, *args))


@functools.cache
def _function(name: str) -> Any:
    from chainer.backends.cuda import cupy

    return cupy.RawModule(code=_SOURCE).get_function(name)


@functools.cache
def _counter(place: elementwise.Place) -> Array:
    """Return the counter of finished blocks, which is zero between launches."""
    from chainer.backends.cuda import cupy

    return cupy.zeros(1, np.uint32)
