"""The stand-in for NCCL, where ChainerMN does not call it."""

import pytest
from mpi4py import MPI

pytestmark = pytest.mark.gpu

WORLD = MPI.COMM_WORLD


@pytest.fixture
def comm(virtual_gpu, monkeypatch):
    """A communicator of all ranks."""
    monkeypatch.setenv('NCCL_HOSTID', f'rank {WORLD.rank}')  # all ranks use device 0
    nccl = virtual_gpu.cuda.nccl
    if not hasattr(nccl.NcclCommunicator, 'commSplit'):
        pytest.skip('CuPy 13 cannot split communicators')
    comm = nccl.NcclCommunicator(WORLD.size, WORLD.bcast(nccl.get_unique_id()), WORLD.rank)
    yield comm
    comm.destroy()


@pytest.fixture
def sum_of_ranks(virtual_gpu):
    """Return a function: the sum of 10 ** rank over the ranks of a communicator."""
    nccl = virtual_gpu.cuda.nccl

    def sum_of_ranks(comm):
        x = virtual_gpu.full(1, 10. ** WORLD.rank)
        comm.allReduce(x.data.ptr, x.data.ptr, 1, nccl.NCCL_FLOAT64, nccl.NCCL_SUM,
                       virtual_gpu.cuda.get_current_stream().ptr)
        return float(x[0])
    return sum_of_ranks


@pytest.mark.parametrize('key', [-WORLD.rank, 7], ids=['reversed', 'the_same_key'])
def test_split(comm, sum_of_ranks, key):
    members = list(range(WORLD.rank % 2, WORLD.size, 2))  # even ranks, and odd ones
    part = comm.commSplit(WORLD.rank % 2, key)
    index = members.index(WORLD.rank)
    expected = index if key == 7 else len(members) - 1 - index
    assert (part.size(), part.rank_id()) == (len(members), expected)
    assert sum_of_ranks(part) == sum(10 ** rank for rank in members)
    assert sum_of_ranks(comm) == sum(10 ** rank for rank in range(WORLD.size))
    part.destroy()


def test_split_without_a_color(comm, sum_of_ranks):
    """Rank 0 is in no part; the others split again."""
    for _ in range(2):
        part = comm.commSplit(-1 if WORLD.rank == 0 else 5, 0)
        if WORLD.rank == 0:
            assert part is None
        else:
            assert sum_of_ranks(part) == sum(10 ** rank for rank in range(1, WORLD.size))
            part.destroy()
    assert sum_of_ranks(comm) == sum(10 ** rank for rank in range(WORLD.size))
