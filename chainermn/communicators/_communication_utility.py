"""Functions under old names, which extensions such as K-FAC import."""
from __future__ import annotations

from mpi4py import MPI
from mpi4py.util import pkl5

from chainermn._transport import array_buffers, topology
from chainermn._transport.nccl import connection
from chainermn._types import NcclComm, Object, Stream
from chainermn.communicators._memory_utility import DeviceMemory

INT_MAX = 2**31 - 1
_get_nccl_type_id = connection.type_id


def init_ranks(mpi_comm: MPI.Intracomm) -> tuple[int, int, int, int, int]:
    """Return rank, intra_rank, intra_size, inter_rank, inter_size.

    Collective: every rank calls it.

    Args:
        mpi_comm: MPI communicator of the ranks.
    """
    return (mpi_comm.rank, *topology.discover(mpi_comm)[:4])


def init_intra_mpi_comm(mpi_comm: MPI.Intracomm, intra_rank: int, inter_rank: int) -> MPI.Comm:
    """Return an MPI communicator of the ranks of this node. Collective: every rank calls it.

    Args:
        mpi_comm: MPI communicator of the ranks.
        intra_rank: Index of this process on its node.
        inter_rank: Index of this node.
    """
    return mpi_comm.Split(inter_rank, intra_rank)


def init_inter_mpi_comm(mpi_comm: MPI.Intracomm, intra_rank: int, inter_rank: int) -> MPI.Comm:
    """Return an MPI communicator of the ranks with this ``intra_rank``, one per node.

    Collective: every rank calls it.

    Args:
        mpi_comm: MPI communicator of the ranks.
        intra_rank: Index of this process on its node.
        inter_rank: Index of this node.
    """
    return mpi_comm.Split(intra_rank, inter_rank)


def init_nccl_comm(mpi_comm: MPI.Intracomm) -> NcclComm:
    """Return a ``cupy.cuda.nccl.NcclCommunicator`` for the current devices of the ranks.

    Collective: every rank calls it.

    Args:
        mpi_comm: MPI communicator of the ranks.
    """
    group = connection.NcclGroup(mpi_comm)
    group.connect()
    return group.nccl_comm


def inter_allreduce_gpu(inter_mpi_comm: MPI.Intracomm, size: int, gpu_buffer_a: DeviceMemory,
                        gpu_buffer_b: DeviceMemory, n_bytes_buffer: int, n_elems_per_node: int,
                        n_bytes_per_node: int, cuda_stream: Stream) -> None:
    """Sum float32 buffers over all ranks and divide the sum by ``size``, in place.

    Collective: every rank calls it.

    Args:
        inter_mpi_comm: MPI communicator of the ranks.
        size: Number by which the sum is divided.
        gpu_buffer_a: Ignored.
        gpu_buffer_b: The buffer; it is overwritten with the mean.
        n_bytes_buffer: Ignored.
        n_elems_per_node: Number of elements in the buffer, divided by the number of ranks.
        n_bytes_per_node: Ignored.
        cuda_stream: CUDA stream that writes to the buffer.
    """
    cuda_stream.synchronize()
    array = gpu_buffer_b.array((n_elems_per_node * inter_mpi_comm.size,))
    staged = array_buffers.to_buffer(array)
    inter_mpi_comm.Allreduce(MPI.IN_PLACE, staged)
    total = array_buffers.from_buffer(staged, array.shape, array_buffers.on_device(array))
    array[...] = total / size


def chunked_bcast_obj(obj: Object, mpi_comm: MPI.Intracomm, max_buf_len: int = 256 * 1024 * 1024,
                      root: int = 0) -> Object:
    """Broadcast a picklable object of any size. Collective: every rank calls it.

    Args:
        obj: On the root, the object. Ignored on the other ranks.
        mpi_comm: MPI communicator of the ranks.
        max_buf_len: Ignored, except that it must be valid.
        root: Rank whose object is sent.

    Returns:
        A copy of the object, on every rank.

    Raises:
        AssertionError: If ``max_buf_len`` is not between 0 and ``INT_MAX``.
    """
    assert 0 < max_buf_len < INT_MAX, (
        f'max_buf_len must be from 1 to {INT_MAX - 1}, not {max_buf_len}')
    return pkl5.Intracomm(mpi_comm).bcast(obj, root)
