"""The transport that uses NCCL within each node and MPI between nodes."""
from __future__ import annotations

from typing import ClassVar

from chainermn._process.mpi import MPI
from chainermn._transport import array_buffers
from chainermn._transport.base import Group
from chainermn._transport.nccl.connection import NcclGroup
from chainermn._transport.nccl.nccl_transport import DeviceTransport
from chainermn._types import Array


class NodeNcclTransport(DeviceTransport):
    """Sums gradients on the first rank of each node, then between these ranks, and broadcasts them.

    Between nodes, the sums are staged in page-locked host memory.
    """

    name: ClassVar[str] = 'non_cuda_aware'

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        place = group.topology
        self._is_first = place.intra_rank == 0
        self._intra = self.mpi_comm.Split(place.inter_rank, place.intra_rank)
        self._inter = self.mpi_comm.Split(place.intra_rank, place.inter_rank)
        # The first ranks of all nodes wait for each other. So if one node cannot connect, all ranks
        # must raise an error.
        self._nccl = NcclGroup(self._intra, all_ranks=self.mpi_comm, record=group.record())

    def _staged(self, buffer: Array) -> Array:
        return buffer  # NCCL sums the buffer first

    def _sum(self, buffer: Array, on_device: bool) -> Array:
        self._nccl.connect()
        self._nccl.reduce(buffer)
        if self._is_first and self._inter.size > 1:
            staged = array_buffers.to_buffer(buffer)
            self._inter.Allreduce(MPI.IN_PLACE, staged)
            buffer = array_buffers.from_buffer(staged, staged.shape, device=True)
        self._nccl.bcast(buffer)
        return buffer

    def free(self) -> None:
        super().free()
        self._intra.Free()
        self._inter.Free()
