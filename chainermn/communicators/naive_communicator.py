"""One collective per parameter: the communicator to read, and to test the others against."""
from __future__ import annotations

from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase


class NaiveCommunicator(MpiCommunicatorBase):
    """Averages each gradient by an MPI_Allreduce of its own, on host and device arrays."""
