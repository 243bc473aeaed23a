"""Host memory for means, which is reused once no array refers to it."""
from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np

_UNUSED_ROUNDS = 4  # number of rounds after which unused memory is freed

#: Name, dtype and size.
_Key = tuple[str, np.dtype, int]


class _Memory(NamedTuple):
    buffer: np.ndarray
    lease: weakref.ref[_Lease]
    round: int  # the last round that used this memory


class _Lease:
    """The owner of the arrays in a buffer. It is alive as long as any of these arrays.

    NumPy keeps the object that provides an array interface alive as long as a view of the array
    exists.
    """

    def __init__(self, buffer: np.ndarray) -> None:
        self.__array_interface__ = buffer.__array_interface__
        self._buffer = buffer  # keeps the memory alive


class ResultMemory:
    """Allocates flat host arrays, reusing the memory of arrays that are no longer referenced."""

    def __init__(self) -> None:
        self._held: dict[_Key, _Memory] = {}
        self._round = 0

    def new(self, name: str, dtype: np.dtype, size: int) -> np.ndarray:
        """Return a flat array. A later array with the same name may reuse its memory."""
        key = name, dtype, size
        memory = self._held.pop(key, None)
        is_free = memory is not None and memory.lease() is None
        buffer = memory.buffer if memory is not None and is_free else np.empty(size, dtype)
        lease = _Lease(buffer)
        self._held[key] = _Memory(buffer, weakref.ref(lease), self._round)
        return np.asarray(lease)

    def end_round(self) -> None:
        """Free memory that has been unused for several rounds."""
        self._round += 1
        self._held = {key: memory for key, memory in self._held.items()
                      if memory.round > self._round - _UNUSED_ROUNDS}

    @property
    def nbytes(self) -> list[int]:
        """The sizes of all buffers."""
        return [memory.buffer.nbytes for memory in self._held.values()]
