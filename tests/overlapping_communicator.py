"""A communicator for double buffering on the CPU."""

from chainermn._transport.mpi_transport import MpiTransport
from chainermn.communicators.naive_communicator import NaiveCommunicator


class OverlappingTransport(MpiTransport):
    """Claims to average in the background."""

    can_overlap = True


class OverlappingCommunicator(NaiveCommunicator):
    """Averages in a thread, as if it were on a device."""

    transport_class = OverlappingTransport
