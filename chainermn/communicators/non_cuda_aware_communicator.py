"""Uses NCCL within each node and MPI between nodes, for GPUs if MPI is not CUDA-aware."""
from __future__ import annotations

from chainermn._transport.nccl.by_node import NodeNcclTransport
from chainermn.communicators._nccl_communicator_base import NcclCommunicatorBase


class NonCudaAwareCommunicator(NcclCommunicatorBase):
    """Sums gradients on the first rank of each node, then over these ranks; broadcasts the result.

    Between nodes, the sums are staged in page-locked host memory.

    Example:
        >>> comm = chainermn.create_communicator('non_cuda_aware')  # doctest: +SKIP
        >>> chainer.get_device(f'@cupy:{comm.intra_rank}').use() # doctest: +SKIP
    """

    transport_class = NodeNcclTransport
