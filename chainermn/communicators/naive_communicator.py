"""All-reduces by MPI: the simplest communicator, and the reference for tests."""
from __future__ import annotations

from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase


class NaiveCommunicator(MpiCommunicatorBase):
    """Averages each gradient by its own MPI_Allreduce, for arrays on the host and on a device.

    Example:
        >>> comm = chainermn.create_communicator('naive')
    """
