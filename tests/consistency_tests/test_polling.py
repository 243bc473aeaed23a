"""Waiting for a message: it may be there, arrive while this rank polls, or much later."""

import numpy as np
import pytest
from mpi4py import MPI

from chainermn._consistency import polling

WORLD = MPI.COMM_WORLD


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('polls', [0, 1, polling._POLLS])
def test_returns_with_the_message_and_its_status(monkeypatch, polls):
    monkeypatch.setattr(polling, '_POLLS', polls)
    mpi_comm, status, received = WORLD.Dup(), MPI.Status(), np.zeros(3, int)
    if WORLD.rank == 1:
        request = mpi_comm.Irecv(received, MPI.ANY_SOURCE, 5)
        mpi_comm.Send(np.zeros(1), 0)  # now rank 0 may send
        polling.wait(request, status)
        assert (status.source, status.tag, received.tolist()) == (0, 5, [1, 2, 3])
        assert request == MPI.REQUEST_NULL
    elif WORLD.rank == 0:
        polling.wait(mpi_comm.Irecv(np.zeros(1), 1))
        mpi_comm.Send(np.array([1, 2, 3]), 1, 5)
    mpi_comm.Free()
