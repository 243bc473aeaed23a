"""Packs and unpacks gradients but sends nothing: what is left is the cost of the exchange."""
from __future__ import annotations

from typing import Any

from chainermn.communicators import _bucket
from chainermn.communicators.flat_communicator import FlatCommunicator


class DummyCommunicator(FlatCommunicator):
    """Measures the time of a training step without its communication.

    Each rank keeps its own gradients, which go through the buffer, and the compression if there is
    one, all the same.  Everything else,
    :meth:`bcast_data` too, communicates.
    """

    def multi_node_mean_grad(self, model: Any, zero_fill: bool = False,
                             compression: Any = None) -> None:
        arrays, compressor = self._agreed_gradients(model, zero_fill, compression)
        groups = self._groups(list(arrays.values()))
        buffers = [_bucket.pack(group) for group in groups]
        if compressor is not None:
            buffers = [
                compressor.decompress(wire, buffer.size, buffer.dtype) for wire, buffer
                in zip(self._agreed_wires(compressor, buffers, arrays), buffers, strict=True)]
        for group, buffer in zip(groups, buffers, strict=True):
            _bucket.unpack(buffer, group)
