"""Base classes for custom transports.

A communicator class selects its transport. :class:`MpiTransport` implements all methods::

    class MyCommunicator(MpiCommunicatorBase):
        transport_class = MyTransport  # derives from MpiTransport and defines mean()
"""
from chainermn._transport.array_list import ArrayList
from chainermn._transport.base import Codec, Compressor, Group
from chainermn._transport.mpi_transport import MpiTransport
from chainermn._transport.shared_memory.shared_memory_transport import SharedMemoryTransport

__all__ = ['ArrayList', 'Codec', 'Compressor', 'Group', 'MpiTransport', 'SharedMemoryTransport']
