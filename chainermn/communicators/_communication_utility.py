"""Old names for what is now in other files; extensions such as K-FAC import them."""
from __future__ import annotations

from typing import Any

from mpi4py import MPI
from mpi4py.util import pkl5

from chainermn._transport import array_buffers, topology
from chainermn._transport.nccl import connection

INT_MAX = 2**31 - 1
_get_nccl_type_id = connection.type_id


def init_ranks(mpi_comm: Any) -> tuple[int, int, int, int, int]:
    """Returns rank, intra_rank, intra_size, inter_rank, inter_size.

    Collective: every rank calls it.
    """
    return (mpi_comm.rank, *topology.discover(mpi_comm))


def init_intra_mpi_comm(mpi_comm: Any, intra_rank: int, inter_rank: int) -> Any:
    """Returns an MPI communicator of the ranks of this node.  Collective: every rank calls it."""
    return mpi_comm.Split(inter_rank, intra_rank)


def init_inter_mpi_comm(mpi_comm: Any, intra_rank: int, inter_rank: int) -> Any:
    """Returns one of the ranks with this intra_rank.  Collective: every rank calls it."""
    return mpi_comm.Split(intra_rank, inter_rank)


def init_nccl_comm(mpi_comm: Any) -> Any:
    """Returns an NcclCommunicator for the current devices.  Collective: every rank calls it."""
    group = connection.NcclGroup(mpi_comm)
    group.connect()
    return group.nccl_comm


def inter_allreduce_gpu(inter_mpi_comm: Any, size: int, gpu_buffer_a: Any, gpu_buffer_b: Any,
                        n_bytes_buffer: int, n_elems_per_node: int, n_bytes_per_node: int,
                        cuda_stream: Any) -> None:
    """Sums float32 buffers B over all ranks and divides them by ``size``; A is left alone.

    Collective: every rank calls it.
    """
    cuda_stream.synchronize()
    array = gpu_buffer_b.array((n_elems_per_node * inter_mpi_comm.size,))
    staged = array_buffers.to_buffer(array)
    inter_mpi_comm.Allreduce(MPI.IN_PLACE, staged)
    total = array_buffers.from_buffer(staged, array.shape, array_buffers.on_device(array))
    array[...] = total / size


def chunked_bcast_obj(obj: Any, mpi_comm: Any, max_buf_len: int = 256 * 1024 * 1024,
                      root: int = 0) -> Any:
    """Broadcasts an object of any size; ``max_buf_len`` has no effect.

    Collective: every rank calls it.

    Raises:
        AssertionError: If not ``0 < max_buf_len < INT_MAX``.
    """
    assert 0 < max_buf_len < INT_MAX, (
        f'max_buf_len has to be from 1 to {INT_MAX - 1}, not {max_buf_len}')
    return pkl5.Intracomm(mpi_comm).bcast(obj, root)
