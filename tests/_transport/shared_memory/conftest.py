"""A communicator of nodes, each of which is a rank here, and the bytes that a rank sends."""

import pytest
from mpi4py import MPI


@pytest.fixture(scope='module')
def inter():
    mpi_comm = MPI.COMM_WORLD.Dup()
    yield mpi_comm
    mpi_comm.Free()


class Counting:
    """Counts the bytes that this rank sends."""

    def __init__(self, inter):
        self.rank, self.size = inter.rank, inter.size
        self.inter = inter
        self.sent = 0

    def Isend(self, data, *args):  # noqa: N802
        self.sent += data.nbytes
        return self.inter.Isend(data, *args)

    def Irecv(self, data, *args):  # noqa: N802
        return self.inter.Irecv(data, *args)


@pytest.fixture
def counting(inter):
    return Counting(inter)
