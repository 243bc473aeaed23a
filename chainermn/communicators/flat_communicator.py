"""Averages all gradients of a dtype together: in shared memory, or in one buffer on a device."""
from __future__ import annotations

from chainermn._transport.shared_memory.shared_memory_transport import SharedMemoryTransport
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase


class FlatCommunicator(MpiCommunicatorBase):
    """Averages all gradients of a dtype together.

    Host arrays are averaged in shared memory. Arrays on a device, and host arrays if no shared
    memory is available, are averaged with one MPI_Allreduce. Other operations also sum large host
    arrays in shared memory.

    Example:
        >>> comm = chainermn.create_communicator('flat')
    """

    transport_class = SharedMemoryTransport
