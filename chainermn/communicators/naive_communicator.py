"""Averages gradients with MPI_Allreduce: the simplest communicator, a reference for tests."""
from __future__ import annotations

from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase


class NaiveCommunicator(MpiCommunicatorBase):
    """Averages gradients with MPI_Allreduce, for arrays on the host and on a device.

    Each gradient needs one call, except that small gradients on the host are averaged together.

    Example:
        >>> comm = chainermn.create_communicator('naive')
    """
