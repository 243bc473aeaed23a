"""One exchange per model and dtype: in shared memory on the host, in one buffer on a device."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chainermn.communicators import _bucket, _shared_memory, _wire
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase


class FlatCommunicator(MpiCommunicatorBase):
    """Averages all gradients of a dtype at once.

    Host arrays are averaged in memory that the ranks of a node share (see `_shared_memory`), device
    arrays, and host arrays where there is no such memory, by one MPI_Allreduce.
    """

    _memory: Any = None
    _has_tried_memory = False

    def _groups(self, arrays: Sequence[Any]) -> list[list[Any]]:
        return _bucket.by_dtype(arrays)

    def _mean_in_place(self, group: list[Any]) -> None:
        if self._size == 1:
            return
        if (memory := self._shared_memory(group)) is None:
            super()._mean_in_place(group)
        else:
            memory.sum(group, scale=1 / self._size)

    def _bcast_in_place(self, group: list[Any]) -> None:
        if self._size == 1:
            return
        if (memory := self._shared_memory(group)) is None:
            super()._bcast_in_place(group)
        else:
            memory.bcast(group)

    def finalize(self) -> None:
        memory, self._memory = self._memory, None
        super().finalize()
        if memory is not None:
            memory.free()

    def _shared_memory(self, group: list[Any]) -> Any:
        """Where to exchange the arrays; ``None`` where MPI has to."""
        if _wire.on_device(group[0]):
            return None
        if not self._has_tried_memory:
            self._has_tried_memory = True
            self._memory = _shared_memory.create(self._arrays, self._topology)
        return self._memory
