"""A communicator for double buffering on the CPU."""

from chainermn.communicators.naive_communicator import NaiveCommunicator


class OverlappingCommunicator(NaiveCommunicator):
    """Averages in a thread, as if it were on a device."""

    _can_overlap = True
