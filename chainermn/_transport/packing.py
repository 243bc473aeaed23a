"""Packs several arrays into one flat buffer and unpacks them; buffers for collectives."""
from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import chainer
import numpy as np

from chainermn._process.mpi import MPI
from chainermn._transport import array_buffers, batched_copy
from chainermn._types import Array


def pack(arrays: Sequence[Array], dtype: np.dtype | None = None, batched: bool = False,
         scale: float | None = None) -> Array:
    """Return the elements of all arrays, each in C order, as one flat array.

    A single contiguous array of the right dtype is not copied, unless it is scaled.

    Args:
        arrays: At least one array.
        dtype: The dtype of the result, or ``None`` for the dtype of the first array.
        batched: Whether a single kernel copies all arrays on a device, which must be
            floating-point.
        scale: The factor for the elements, applied before rounding.
    """
    dtype = arrays[0].dtype if dtype is None else dtype
    xp = chainer.backend.get_array_module(arrays[0])
    if scale is None:
        if len(arrays) == 1 and arrays[0].flags.c_contiguous:
            return arrays[0].reshape(-1).astype(dtype, copy=False)
        if xp is np:
            return np.concatenate(arrays, None, dtype=dtype, casting='unsafe')
    buffer = xp.empty(sum(array.size for array in arrays), dtype)
    placed = _placed(arrays)
    if batched:
        placed = batched_copy.pack(buffer, placed, 1 if scale is None else scale)
    for start, array in placed:
        part = buffer[start:start + array.size].reshape(array.shape)
        if scale is None:
            part[...] = array
        else:
            _scale(array, scale, part)
    return buffer


def unpack(buffer: Array, arrays: Sequence[Array], scale: float | None = None,
           batched: bool = False) -> None:
    """Copy a flat array into arrays, multiplied by ``scale`` and cast to their dtypes.

    float16 is multiplied in float32 and rounded once.
    """
    xp = chainer.backend.get_array_module(arrays[0])
    placed = _placed(arrays)
    if batched and scale is not None and array_buffers.on_device(buffer):
        placed = batched_copy.unpack(buffer, placed, scale)
    for start, array in placed:
        part = buffer[start:start + array.size].reshape(array.shape)
        if scale is not None:
            _scale(part, scale, array)
        elif not (array.size and xp.may_share_memory(part, array)):
            array[...] = part


def unpacked(buffer: Array, arrays: Sequence[Array], batched: bool = False) -> list[Array]:
    """Return the parts of a flat array as arrays with the shapes and dtypes of ``arrays``.

    Parts that have the dtype of the buffer are views of it, unless a single kernel copies all parts
    on a device.
    """
    if batched and array_buffers.on_device(buffer) and any(
            array.dtype != buffer.dtype for array in arrays):
        xp = chainer.backend.get_array_module(buffer)
        results = [xp.empty(array.shape, array.dtype) for array in arrays]
        unpack(buffer, results, 1, batched)
        return results
    with np.errstate(over='ignore'):
        return [part.astype(array.dtype, copy=False) for part, array in zip(
            parts(buffer, [array.shape for array in arrays]), arrays, strict=True)]


def parts(buffer: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Return the parts of a flat array as views with the given shapes."""
    ends = itertools.accumulate(map(math.prod, shapes), initial=0)
    return [buffer[start:end].reshape(shape)
            for (start, end), shape in zip(itertools.pairwise(ends), shapes, strict=True)]


class PackedArrays:
    """Arrays of one dtype, one for or from each rank, side by side in one buffer for MPI."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype, device: bool,
                 buffer: Array | None = None) -> None:
        self._shapes = shapes
        self._device = device
        #: Whether all shapes are the same, so that collectives without counts can be used.
        self.homogeneous = shapes.count(shapes[0]) == len(shapes)
        if buffer is None:
            size = len(shapes) * math.prod(shapes[0]) if self.homogeneous else sum(
                map(math.prod, shapes))
            buffer = array_buffers.new_buffer((size,), dtype, device)
        self.buffer = buffer

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> PackedArrays:
        """Pack arrays in order to send them."""
        return cls([array.shape for array in arrays], arrays[0].dtype, False,
                   array_buffers.to_buffer(pack(arrays)))

    @property
    def raw(self) -> Array:
        """The buffer as bytes."""
        return array_buffers.raw(self.buffer)

    @property
    def spec(self) -> list[Array]:
        """The buffer specification of mpi4py: bytes, counts, displacements and datatype."""
        itemsize = self.buffer.dtype.itemsize
        counts = [itemsize * math.prod(shape) for shape in self._shapes]
        return [self.raw, counts, [0, *itertools.accumulate(counts[:-1])], MPI.BYTE]

    def arrays(self) -> tuple[Array, ...]:
        """Return the arrays, as views of the buffer."""
        if self.homogeneous:
            shape = len(self._shapes), *self._shapes[0]
            complete = array_buffers.from_buffer(self.buffer, shape, self._device)
            return tuple([complete[rank, ...] for rank in range(len(complete))])
        complete = array_buffers.from_buffer(self.buffer, self.buffer.shape, self._device)
        return tuple(parts(complete, self._shapes))


def _scale(x: Array, scale: float, out: Array) -> None:
    """Multiply in the wider dtype, at least float32, and round once."""
    wide = np.result_type(x.dtype, out.dtype, np.float32)
    chainer.backend.get_array_module(x).multiply(
        x, wide.type(scale), out=out, dtype=wide, casting='same_kind')


def _placed(arrays: Sequence[Array]) -> list[tuple[int, Array]]:
    """Return the arrays, each with its start in the buffer."""
    ends = itertools.accumulate((array.size for array in arrays), initial=0)
    return list(zip(ends, arrays, strict=False))
