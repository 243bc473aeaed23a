"""Arrays of one dtype for or from all ranks, side by side in one buffer."""
from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from chainermn.communicators import _bucket, _wire


class Pieces:
    """Arrays of one dtype for or from all ranks, side by side in one buffer."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype, device: bool,
                 buffer: Any = None) -> None:
        self._shapes = shapes
        self._device = device
        self._ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
        self.buffer = _wire.new_buffer((self._ends[-1],), dtype, device) \
            if buffer is None else buffer

    @classmethod
    def of(cls, arrays: Sequence[Any]) -> Pieces:
        """Packs arrays to be sent."""
        return cls([array.shape for array in arrays], arrays[0].dtype, False,
                   _wire.to_buffer(_bucket.pack(arrays)))

    @property
    def spec(self) -> list[Any]:
        """What mpi4py takes: the buffer as bytes, and count and start of each piece."""
        size = self.buffer.dtype.itemsize
        starts = [0, *self._ends[:-1]]
        counts = [size * (end - start) for start, end in zip(starts, self._ends, strict=True)]
        return [_wire.raw(self.buffer), counts, [size * start for start in starts], MPI.BYTE]

    def arrays(self) -> tuple[Any, ...]:
        """The pieces as arrays."""
        whole = _wire.from_buffer(self.buffer, self.buffer.shape, self._device)
        starts = [0, *self._ends[:-1]]
        return tuple(whole[start:end].reshape(shape) for start, end, shape in zip(
            starts, self._ends, self._shapes, strict=True))
