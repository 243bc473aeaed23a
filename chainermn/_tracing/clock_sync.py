"""How the clock of each rank stands to that of one of them, measured by messages to and fro."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

#: Messages to and fro with each rank.  The quickest of them counts.
_TIMES = 20


class Offset(NamedTuple):
    """How to get another clock's time from one's own; in the units of these clocks."""

    offset: int  # to be added
    error: int  # by which it may be wrong, either way


def compare(mpi_comm: Any, clock: Callable[[], int]) -> Offset:
    """Compares the clock of this rank with that of rank 0.  Collective: every rank calls it.

    Whose message comes back after a time t has been answered within that time; so halfway is at
    most t / 2 off.

    Args:
        mpi_comm: The ranks; nothing else may be going on there.
        clock: Returns the time.
    """
    sent, theirs = np.zeros(2, np.int64), np.zeros(2, np.int64)
    if mpi_comm.rank > 0:
        for _ in range(_TIMES):
            mpi_comm.Recv(theirs, 0)
            sent[0] = clock()
            mpi_comm.Send(sent, 0)
        mpi_comm.Recv(theirs, 0)
        return Offset(int(theirs[0]), int(theirs[1]))
    for rank in range(1, mpi_comm.size):
        tried = []
        for _ in range(_TIMES):
            begin = clock()
            mpi_comm.Send(sent, rank)
            mpi_comm.Recv(theirs, rank)
            end = clock()
            tried.append((end - begin, (begin + end) // 2 - int(theirs[0])))
        took, offset = min(tried)
        sent[:] = offset, took // 2 + 1
        mpi_comm.Send(sent, rank)
    return Offset(0, 0)
