"""Arrays of one dtype for or from all ranks, side by side in one buffer."""
from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from chainermn._transport import array_buffers, packing


class Pieces:
    """Arrays of one dtype for or from all ranks, side by side in one buffer."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype, device: bool,
                 buffer: Any = None) -> None:
        self._shapes = shapes
        self._device = device
        #: Whether they are of one shape, so that collectives without counts can move them.
        self.are_alike = shapes.count(shapes[0]) == len(shapes)
        if buffer is None:
            size = len(shapes) * math.prod(shapes[0]) if self.are_alike else sum(
                map(math.prod, shapes))
            buffer = array_buffers.new_buffer((size,), dtype, device)
        self.buffer = buffer

    @classmethod
    def of(cls, arrays: Sequence[Any]) -> Pieces:
        """Packs arrays to be sent."""
        return cls([array.shape for array in arrays], arrays[0].dtype, False,
                   array_buffers.to_buffer(packing.pack(arrays)))

    @property
    def raw(self) -> Any:
        """The buffer as bytes."""
        return array_buffers.raw(self.buffer)

    @property
    def spec(self) -> list[Any]:
        """What mpi4py takes: the buffer as bytes, and count and start of each piece."""
        itemsize = self.buffer.dtype.itemsize
        counts = [itemsize * math.prod(shape) for shape in self._shapes]
        return [self.raw, counts, [0, *itertools.accumulate(counts[:-1])], MPI.BYTE]

    def arrays(self) -> tuple[Any, ...]:
        """The pieces as arrays."""
        if self.are_alike:
            shape = len(self._shapes), *self._shapes[0]
            whole = array_buffers.from_buffer(self.buffer, shape, self._device)
            return tuple([whole[rank, ...] for rank in range(len(whole))])
        whole = array_buffers.from_buffer(self.buffer, self.buffer.shape, self._device)
        ends = list(itertools.accumulate(map(math.prod, self._shapes)))
        return tuple(whole[start:end].reshape(shape) for start, end, shape in zip(
            [0, *ends[:-1]], ends, self._shapes, strict=True))
