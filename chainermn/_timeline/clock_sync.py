"""Clock synchronization: measures the offsets between the clocks of ranks."""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from chainermn._process.mpi import MPI

#: Round trips with each rank; the fastest one is used.
_ROUND_TRIPS = 20


class Offset(NamedTuple):
    """The offset of another clock, in the unit of the clocks."""

    offset: int  # local time + offset = time of the other clock
    error: int  # maximum error, in either direction


def measure(mpi_comm: MPI.Intracomm, clock: Callable[[], int]) -> Offset:
    """Measure the offset of rank 0's clock from the clock of this rank.

    Collective: every rank calls it. A message that returns after a time t was answered within that
    time, so the midpoint is off by at most t / 2.

    Args:
        mpi_comm: The communicator; no other operation may be in progress on it.
        clock: Function that returns the time.
    """
    sent, theirs = np.zeros(2, np.int64), np.zeros(2, np.int64)
    if mpi_comm.rank > 0:
        for _ in range(_ROUND_TRIPS):
            mpi_comm.Recv(theirs, 0)
            sent[0] = clock()
            mpi_comm.Send(sent, 0)
        mpi_comm.Recv(theirs, 0)
        return Offset(int(theirs[0]), int(theirs[1]))
    for rank in range(1, mpi_comm.size):
        round_trips = []
        for _ in range(_ROUND_TRIPS):
            begin = clock()
            mpi_comm.Send(sent, rank)
            mpi_comm.Recv(theirs, rank)
            end = clock()
            round_trips.append((end - begin, (begin + end) // 2 - int(theirs[0])))
        took, offset = min(round_trips)
        sent[:] = offset, took // 2 + 1
        mpi_comm.Send(sent, rank)
    return Offset(0, 0)
