"""One exchange per model and dtype: in shared memory on the host, in one buffer on a device."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from chainermn._transport import array_buffers, packing
from chainermn._transport.mpi import MpiTransport
from chainermn._transport.shared_memory import exchange
from chainermn._transport.shared_memory.exchange import SharedMemory
from chainermn._transport.shared_memory.transport import SharedTransport
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase


class FlatCommunicator(MpiCommunicatorBase):
    """Averages all gradients of a dtype at once.

    Host arrays are averaged in memory that the ranks of a node share (see `_shared_memory`), device
    arrays, and host arrays where there is no such memory, by one MPI_Allreduce.  Large host arrays
    are summed there by the other operations too.
    """

    _memory: SharedMemory | None = None
    _has_tried_memory = False

    def __init__(self, mpi_comm: Any) -> None:
        super().__init__(mpi_comm)
        self._shared_transport = SharedTransport(self._arrays, self._shared_memory)

    def _transport(self, device: bool, alike: bool) -> MpiTransport:
        if device or not alike or self._size == 1:
            return super()._transport(device, alike)
        return self._shared_transport

    def _groups(self, arrays: Sequence[Any]) -> list[list[Any]]:
        return packing.by_dtype(arrays)

    def _mean_in_place(self, group: list[Any]) -> None:
        if self._size == 1:
            return
        if array_buffers.on_device(group[0]) or (memory := self._shared_memory()) is None:
            super()._mean_in_place(group)
        else:
            memory.sum(group, scale=1 / self._size)

    def _mean(self, group: list[Any], results: list[Any]) -> None:
        if array_buffers.on_device(group[0]) or (memory := self._shared_memory()) is None:
            super()._mean(group, results)
        else:
            memory.sum(group, results, scale=1 / self._size)

    def _new_mean_queue(self, mpi_comm: Any, agree: Callable[..., dict[str, Any]]) -> Any:
        self._shared_memory()  # now, as all ranks are here
        return super()._new_mean_queue(mpi_comm, agree)

    def _wait_patiently(self, patient: bool) -> None:
        if self._memory is not None:
            self._memory.wait_patiently(patient)

    def _bcast_in_place(self, group: list[Any]) -> None:
        if self._size == 1:
            return
        if array_buffers.on_device(group[0]) or (memory := self._shared_memory()) is None:
            super()._bcast_in_place(group)
        else:
            memory.bcast(group)

    def give_up(self, unusable: Any) -> None:
        super().give_up(unusable)
        self._memory = None

    def _described(self, verb: str, arrays: dict[str, Any]) -> dict[str, str]:
        return packing.describe(arrays, places=True)  # each takes its own way

    def _shared_memory(self) -> SharedMemory | None:
        """Where to exchange host arrays; ``None`` where MPI has to."""
        if not self._has_tried_memory:
            self._has_tried_memory = True
            self._memory = exchange.create(self._arrays, self._topology)
            if self._memory is not None:
                self._to_free.append(self._memory.free)
        return self._memory
