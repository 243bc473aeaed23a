"""Packs and unpacks gradients but sends nothing: what is left is the cost of the exchange."""
from __future__ import annotations

from typing import Any

from chainermn._transport import packing
from chainermn.communicators.flat_communicator import FlatCommunicator


class DummyCommunicator(FlatCommunicator):
    """Measures the time of a training step without its communication.

    Each rank keeps its own gradients, which go through the buffer, and the compression if there is
    one, all the same.  Everything else, ``bcast_data`` too, communicates.
    """

    def _mean_in_place(self, group: list[Any]) -> None:
        packing.unpack(packing.pack(group), group)

    def _mean(self, group: list[Any], results: list[Any]) -> None:
        packing.unpack(packing.pack(group), results)

    def _mean_of_wires(self, compressor: Any, wire: Any, buffer: Any) -> Any:
        return compressor.decompress(wire, buffer.size, buffer.dtype)

    def check_replicas(self, model: Any) -> None:
        """Does nothing: replicas drift apart where no gradients are exchanged."""

    def _check_own(self, gradients: dict[str, Any]) -> None:
        """Nothing: they harm nobody else."""

    def _check(self, model: Any) -> None:
        """Nothing: each rank has its own."""
