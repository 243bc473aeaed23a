"""Buffers of collectives: one array per rank, side by side."""
from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from chainermn._process.mpi import MPI
from chainermn._transport import array_buffers, packing
from chainermn._types import Array


class PackedArrays:
    """Arrays of one dtype, one for or from each rank, side by side in one buffer."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype, device: bool,
                 buffer: Array | None = None) -> None:
        self._shapes = shapes
        self._device = device
        #: Whether all shapes are equal, so that collectives without counts can be used.
        self.homogeneous = shapes.count(shapes[0]) == len(shapes)
        if buffer is None:
            size = len(shapes) * math.prod(shapes[0]) if self.homogeneous else sum(
                map(math.prod, shapes))
            buffer = array_buffers.new_buffer((size,), dtype, device)
        self.buffer = buffer

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> PackedArrays:
        """Pack arrays to be sent."""
        return cls([array.shape for array in arrays], arrays[0].dtype, False,
                   array_buffers.to_buffer(packing.pack(arrays)))

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
        return tuple(packing.parts(complete, self._shapes))
