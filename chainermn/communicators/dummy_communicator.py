"""Packs and unpacks gradients but sends nothing, to measure the cost of the exchange."""
from __future__ import annotations

from chainermn._transport.without_exchange import WithoutExchange
from chainermn.communicators.flat_communicator import FlatCommunicator


class DummyCommunicator(FlatCommunicator):
    """Does not average gradients, to measure a training step without communication.

    Each rank keeps its own gradients, which are still packed, and compressed if there is
    compression.  Everything else, including ``bcast_data``, communicates.
    """

    transport_class = WithoutExchange
