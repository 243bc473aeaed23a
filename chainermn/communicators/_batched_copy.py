"""All gradients into one device buffer, or out of it, by one kernel launch.

The host cuts the arrays into pieces of at most ``LENGTH`` elements and uploads a table of them; one
block of threads copies one piece.  So small arrays cost a block each and large ones fill the
device, and no thread has to search for the array it works on.  A table is kept for as long as
gradients come back at the same addresses, which is the rule once the memory pool is warm.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

LENGTH = 8192
THREADS = 256

#: ``struct Piece`` of the kernels.
PIECE = np.dtype([('array', np.int64), ('start', np.int64), ('size', np.int32),
                  ('itemsize', np.int32)])

#: By the size of an element of the buffer: its type, and the type to calculate in.
_ELEMENTS = {2: ('__half', 'float'), 4: ('float', 'float'), 8: ('double', 'double')}

_KERNELS = r'''
struct Piece {
    long long array;  // address of the first element
    long long start;  // where in the buffer it belongs
    int size;         // number of elements
    int itemsize;     // 2, 4, 8: the array is of float16, float32, float64
};

__device__ inline float wide(__half x) { return __half2float(x); }
__device__ inline float wide(float x) { return x; }
__device__ inline double wide(double x) { return x; }

__device__ inline void put(__half& to, float x) { to = __float2half_rn(x); }
__device__ inline void put(__half& to, double x) { to = __double2half(x); }
__device__ inline void put(float& to, double x) { to = (float)x; }
__device__ inline void put(double& to, double x) { to = x; }

template <typename T>
__device__ inline void copy_in(const T* array, Element* buffer, int size, double scale) {
    typedef decltype(wide(*array) * Wide()) Wider;
    for (int i = threadIdx.x; i < size; i += blockDim.x)
        put(buffer[i], wide(array[i]) * (Wider)scale);
}

template <typename T>
__device__ inline void copy_out(const Element* buffer, T* array, int size, Wide scale) {
    for (int i = threadIdx.x; i < size; i += blockDim.x)
        put(array[i], wide(buffer[i]) * scale);
}

extern "C" __global__ void pack(const Piece* pieces, Element* buffer, double scale) {
    const Piece piece = pieces[blockIdx.x];
    buffer += piece.start;
    switch (piece.itemsize) {
        case 2: copy_in((const __half*)piece.array, buffer, piece.size, scale); break;
        case 4: copy_in((const float*)piece.array, buffer, piece.size, scale); break;
        case 8: copy_in((const double*)piece.array, buffer, piece.size, scale); break;
    }
}

extern "C" __global__ void unpack(const Piece* pieces, const Element* buffer, double scale) {
    const Piece piece = pieces[blockIdx.x];
    buffer += piece.start;
    switch (piece.itemsize) {
        case 2: copy_out(buffer, (__half*)piece.array, piece.size, (Wide)scale); break;
        case 4: copy_out(buffer, (float*)piece.array, piece.size, (Wide)scale); break;
        case 8: copy_out(buffer, (double*)piece.array, piece.size, (Wide)scale); break;
    }
}
'''


def pack(buffer: Any, placed: Sequence[tuple[int, Any]], scale: float) -> list[tuple[int, Any]]:
    """Copies arrays into a flat buffer, on the current stream.

    Args:
        buffer: Device array of float16, float32 or float64.
        placed: The arrays, each with its start in the buffer.
        scale: Multiplies the elements, which are then rounded to the dtype of the buffer.

    Returns:
        Those arrays that the kernel does not take and that are not copied: those that are not
        C-contiguous or not on the device of the buffer.
    """
    return _launch('pack', buffer, placed, scale)


def unpack(buffer: Any, placed: Sequence[tuple[int, Any]], scale: float) -> list[tuple[int, Any]]:
    """Copies a flat buffer into arrays, multiplied by ``scale`` and cast to theirs; see `pack`."""
    return _launch('unpack', buffer, placed, scale)


def source(itemsize: int) -> str:
    """Returns the CUDA source for buffers whose elements have that size in bytes."""
    element, wide = _ELEMENTS[itemsize]
    return (f'#include <cuda_fp16.h>\ntypedef {element} Element;\ntypedef {wide} Wide;\n'
            f'{_KERNELS}')


def pieces(arrays: Sequence[tuple[int, int, int, int]]) -> np.ndarray:
    """Cuts arrays, given as (address, start, size, itemsize), into pieces."""
    address, start, size, itemsize = np.array(arrays, np.int64).reshape(-1, 4).T
    counts = -(-size // LENGTH)
    which = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    offset = (np.arange(len(which)) - first[which]) * LENGTH
    table = np.empty(len(which), PIECE)
    table['array'] = address[which] + offset * itemsize[which]
    table['start'] = start[which] + offset
    table['size'] = np.minimum(size[which] - offset, LENGTH)
    table['itemsize'] = itemsize[which]
    return table


def _launch(name: str, buffer: Any, placed: Sequence[tuple[int, Any]],
            scale: float) -> list[tuple[int, Any]]:
    import cupy

    device = buffer.data.device_id
    taken, left = [], []
    for start, array in placed:
        if (array.dtype.kind == 'f' and array.flags.c_contiguous
                and array.data.device_id == device):
            taken.append((array.data.ptr, start, array.size, array.itemsize))
        else:
            left.append((start, array))
    count, table = _table(device, cupy.cuda.get_current_stream().ptr, tuple(taken))
    if count:
        _kernel(name, buffer.itemsize)((count,), (THREADS,), (table, buffer, np.float64(scale)))
    return left


@functools.lru_cache(maxsize=16)
def _table(device: int, stream: int, arrays: tuple[tuple[int, int, int, int], ...]) -> Any:
    """Returns the number of pieces and the table of them on the device.

    Uploaded on a stream, a table is there for the kernels on this stream only.
    """
    import cupy

    table = pieces(arrays)
    return len(table), cupy.asarray(table.view(np.uint8))


@functools.cache
def _kernel(name: str, itemsize: int) -> Any:
    import cupy

    return cupy.RawModule(code=source(itemsize)).get_function(name)
