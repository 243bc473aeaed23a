"""NCCL within each node, MPI between the nodes: for GPUs and an MPI that cannot reach them."""
from __future__ import annotations

from typing import Any

from mpi4py import MPI

from chainermn._transport import array_buffers
from chainermn._transport.nccl.connection import NcclGroup
from chainermn.communicators._nccl_communicator_base import NcclCommunicatorBase


class NonCudaAwareCommunicator(NcclCommunicatorBase):
    """Averages gradients by node: summed on its first rank, between the first ranks, sent back.

    Between the nodes the sums go through page-locked host memory.
    """

    _name = 'non_cuda_aware'

    def __init__(self, mpi_comm: Any) -> None:
        super().__init__(mpi_comm)
        self._intra = self._arrays.Split(self.inter_rank, self.intra_rank)
        self._inter = self._arrays.Split(self.intra_rank, self.inter_rank)
        self._to_free += [self._intra.Free, self._inter.Free]
        # The first ranks of all nodes wait for each other, so a node that cannot connect has to
        # stop the others.
        self._nccl = NcclGroup(
            self._intra, witnesses=self._arrays, calls=self._agreement.calls)

    def _sum_in_place(self, buffer: Any) -> Any:
        self._nccl.connect()
        self._nccl.reduce(buffer)
        if self.intra_rank == 0 and self.inter_size > 1:
            staged = array_buffers.to_buffer(buffer)
            self._inter.Allreduce(MPI.IN_PLACE, staged)
            buffer = array_buffers.from_buffer(staged, staged.shape, device=True)
        self._nccl.bcast(buffer)
        return buffer
