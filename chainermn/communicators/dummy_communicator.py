"""Packs and unpacks gradients but sends nothing: what is left is the cost of the exchange."""
from __future__ import annotations

from typing import Any

from chainermn.communicators import _bucket
from chainermn.communicators.flat_communicator import FlatCommunicator


class DummyCommunicator(FlatCommunicator):
    """Measures the time of a training step without its communication.

    Each rank keeps its own gradients, which go through the buffer all the same.  Everything else,
    :meth:`bcast_data` too, communicates.
    """

    def multi_node_mean_grad(self, model: Any, zero_fill: bool = False) -> None:
        arrays = self._agreed_parameters('multi_node_mean_grad', model, 'grad', zero_fill)
        for group in self._groups(arrays):
            _bucket.unpack(_bucket.pack(group), group)
