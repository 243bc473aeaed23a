"""Copies all gradients into or out of one device buffer with a single kernel launch.

The host splits the arrays into pieces of at most ``LENGTH`` elements and uploads a table of the
pieces; each block of threads copies one piece. So small arrays cost one block each, large arrays
fill the device, and no thread has to search for its array. Tables are cached, because gradients
usually have the same addresses once the memory pool is warm.
"""
from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from chainermn._types import Array, DeviceArray, Kernel

#: Arrays, each with its start in the buffer.
Placed = Sequence[tuple[int, Array]]
#: Address of an array, its start in the buffer, its size and its itemsize.
_Address = tuple[int, int, int, int]

LENGTH = 8192
THREADS = 256

#: ``struct Piece`` of the kernels.
PIECE = np.dtype([('array', np.int64), ('start', np.int64), ('size', np.int32),
                  ('itemsize', np.int32)])

#: The element type of the buffer, by size in bytes.
_ELEMENTS = {2: '__half', 4: 'float', 8: 'double'}

_KERNELS = r'''
struct Piece {
    long long array;  // address of the first element
    long long start;  // offset in the buffer
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

template <typename T, int n>
struct alignas(sizeof(T) * n < 16 ? sizeof(T) * n : 16) Elements { T x[n]; };

// Each thread reads four times before it writes, to keep more loads in flight.
template <int n, typename From, typename To, typename Wider>
__device__ inline void copy_by(const From* __restrict__ from, To* __restrict__ to, int count,
                               Wider scale) {
    const Elements<From, n>* __restrict__ source = (const Elements<From, n>*)from;
    Elements<To, n>* __restrict__ target = (Elements<To, n>*)to;
    for (int first = threadIdx.x; first < count; first += 4 * blockDim.x) {
        Elements<From, n> x[4];
        #pragma unroll
        for (int k = 0; k < 4; ++k)
            if (first + k * blockDim.x < count)
                x[k] = source[first + k * blockDim.x];
        #pragma unroll
        for (int k = 0; k < 4; ++k)
            if (first + k * blockDim.x < count) {
                Elements<To, n> y;
                #pragma unroll
                for (int j = 0; j < n; ++j)
                    put(y.x[j], wide(x[k].x[j]) * scale);
                target[first + k * blockDim.x] = y;
            }
    }
}

// 16 bytes or more at a time if both sides are aligned to 16 bytes; the rest one by one.
template <typename From, typename To>
__device__ inline void copy(const From* from, To* to, int size, double factor) {
    typedef decltype(wide(*from) * wide(*to)) Wider;
    const Wider scale = (Wider)factor;
    const int n = 16 / (sizeof(From) < sizeof(To) ? sizeof(From) : sizeof(To));
    int done = 0;
    if (((size_t)from | (size_t)to) % 16 == 0) {
        copy_by<n>(from, to, size / n, scale);
        done = size / n * n;
    }
    copy_by<1>(from + done, to + done, size - done, scale);
}

extern "C" __global__ void pack(const Piece* pieces, Element* buffer, double scale) {
    const Piece piece = pieces[blockIdx.x];
    buffer += piece.start;
    switch (piece.itemsize) {
        case 2: copy((const __half*)piece.array, buffer, piece.size, scale); break;
        case 4: copy((const float*)piece.array, buffer, piece.size, scale); break;
        case 8: copy((const double*)piece.array, buffer, piece.size, scale); break;
    }
}

extern "C" __global__ void unpack(const Piece* pieces, const Element* buffer, double scale) {
    const Piece piece = pieces[blockIdx.x];
    buffer += piece.start;
    switch (piece.itemsize) {
        case 2: copy(buffer, (__half*)piece.array, piece.size, scale); break;
        case 4: copy(buffer, (float*)piece.array, piece.size, scale); break;
        case 8: copy(buffer, (double*)piece.array, piece.size, scale); break;
    }
}
'''


def pack(buffer: Array, placed: Placed, scale: float) -> list[tuple[int, Array]]:
    """Copy arrays into a flat buffer, on the current stream.

    Args:
        buffer: A device array of dtype float16, float32 or float64.
        placed: The arrays, each with its start in the buffer.
        scale: The factor for the elements, which are then rounded to the dtype of the buffer.

    Returns:
        The arrays that were not copied, because they are not C-contiguous or not on the device
        of the buffer.
    """
    return _launch('pack', buffer, placed, scale)


def unpack(buffer: Array, placed: Placed, scale: float) -> list[tuple[int, Array]]:
    """Copy a flat buffer into arrays, multiplied by ``scale`` and cast to their dtypes.

    For the arguments and the result, see :func:`pack`.
    """
    return _launch('unpack', buffer, placed, scale)


def source(itemsize: int) -> str:
    """Return the CUDA source for buffers whose elements have the given size in bytes."""
    return f'#include <cuda_fp16.h>\ntypedef {_ELEMENTS[itemsize]} Element;\n{_KERNELS}'


def pieces(arrays: Sequence[_Address]) -> np.ndarray:
    """Split arrays into pieces."""
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


def _launch(name: str, buffer: DeviceArray, placed: Sequence[tuple[int, DeviceArray]],
            scale: float) -> list[tuple[int, DeviceArray]]:
    import cupy

    device = buffer.data.device_id
    taken, left = [], []
    for start, array in placed:
        if (array.dtype.kind == 'f' and array.flags.c_contiguous
                and array.data.device_id == device):
            taken.append((array.data.ptr, start, array.size, array.itemsize))
        else:
            left.append((start, array))
    count, table = tables.get(device, cupy.cuda.get_current_stream().ptr, tuple(taken))
    if count:
        _kernel(name, buffer.itemsize)((count,), (THREADS,), (table, buffer, np.float64(scale)))
    return left


class Tables:
    """An LRU cache of tables on devices.

    A table is valid only for kernels on the stream that uploaded it.

    Args:
        n_bytes: The maximum total size.
    """

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes
        self._lock = threading.Lock()
        self.clear()

    def get(self, device: int, stream: int, arrays: tuple[_Address, ...]) -> tuple[int, Array]:
        """Return the number of pieces and the table on the device.

        Args:
            device: The number of the device.
            stream: The address of the stream.
            arrays: Same as for :func:`pieces`.
        """
        key = device, stream, arrays
        with self._lock:
            if key in self._tables:
                self._tables.move_to_end(key)
            else:
                self._tables[key] = table = _upload(arrays)
                self.n_made += 1
                self._taken += _memory(table)
                while self._taken > self._n_bytes and len(self._tables) > 1:
                    self._taken -= _memory(self._tables.popitem(last=False)[1])
            return self._tables[key]

    def clear(self) -> None:
        """Free all tables."""
        self._tables = OrderedDict[tuple[int, int, tuple[_Address, ...]], tuple[int, Array]]()
        self._taken = 0
        self.n_made = 0


def _upload(arrays: Sequence[_Address]) -> tuple[int, Array]:
    import cupy

    table = pieces(arrays)
    return len(table), cupy.asarray(table.view(np.uint8))


def _memory(table: tuple[int, Array]) -> int:
    """Return the size of a table in bytes; CuPy's pool allocates at least 512."""
    return max(512, table[1].nbytes)


#: Enough for 10 GB of gradients in buckets of 25 MB, each packed and unpacked.
tables = Tables(1 << 24)


@functools.cache
def _kernel(name: str, itemsize: int) -> Kernel:
    import cupy

    return cupy.RawModule(code=source(itemsize)).get_function(name)
