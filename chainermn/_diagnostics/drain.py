"""Receives the remaining messages of a communicator before it is freed or MPI is finalized."""
from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from chainermn._process.mpi import MPI


def drain(mpi_comm: MPI.Intracomm, receive: Callable[[], object], sends: Sequence[MPI.Request]
          ) -> None:
    """Return once all ranks have received all messages. Collective: every rank calls it.

    Args:
        mpi_comm: The communicator.
        receive: Function that receives the messages that have arrived.
        sends: The synchronous sends of this rank, which complete once they have been received.
    """
    barrier = None
    while barrier is None or not barrier.Test():
        receive()
        if barrier is None and all([send.Test() for send in sends]):
            barrier = mpi_comm.Ibarrier()
        os.sched_yield()
