"""Averages data over nodes, which send each other only encoded data."""
from __future__ import annotations

import itertools

import numpy as np

from chainermn._process.mpi import MPI
from chainermn._transport.base import Codec, SlicedCompressor
from chainermn._transport.shared_memory.between_nodes import (
    PART,
    SUM,
    NodeTransfer,
    Waiting,
    split,
)


class Encoding:
    """The compressor of the current call, and a prefix for the keys of its state."""

    codec: Codec
    compressor: SlicedCompressor
    name: str


class EncodedNodeSum(NodeTransfer):
    """Averages a slice over all ranks, like :class:`NodeSum`, with compressed messages.

    Each node encodes and sends its parts, averages the parts that it receives, and sends the
    encoded mean. All nodes decode the same data, so the means are bitwise identical on all nodes.
    A compressor with state has a separate state for each part, on the rank that encodes the part.

    Args:
        inter: Communicator of one rank per node.
        data: The slice of this node; it is replaced with the mean.
        received: Buffer for encoded parts, as large as for :class:`NodeSum`.
        waiting: Used to wait for requests.
        encoding: The compressor.
        key: Identifier of the slice, for the state of the compressor.
    """

    def __init__(self, inter: MPI.Intracomm, data: np.ndarray, received: np.ndarray,
                 waiting: Waiting, encoding: Encoding, key: str) -> None:
        super().__init__(inter, waiting)
        parts, others = split(inter, data)
        self._data = data
        self._own = parts[inter.rank]
        self._others = others if self._own.size else []  # the nodes that send parts to this one
        self._parts = [(node, parts[node]) for node in others if parts[node].size]
        self._memory = received.view(np.uint8)
        self._encoding = encoding
        self._key = f'{key}.{inter.size}'
        self._received: dict[int, np.ndarray] = {}

    def start(self, scale: np.generic | None) -> None:
        # The result is the mean of this node if all nodes have the same number of ranks.
        if scale is not None:
            factor = scale * self._data.dtype.type(self._inter.size)
            if factor != 1:
                np.multiply(self._data, factor, self._data)
        self._receive({node: self._own.size for node in self._others}, PART)
        for node, part in self._parts:
            self._send(self._encode(part, node), node, PART)

    def combine(self, scale: np.generic | None) -> None:
        self._waiting.wait(self._requests)
        own, received = self._own, self._received
        encoded = own  # replaced unless it is empty
        if own.size:
            first, *others = (self._decode(received[node], own) if node in received else own
                              for node in range(self._inter.size))
            total = first + others[0]
            for term in others[1:]:
                total += term
            if scale is not None:
                total /= self._inter.size
            encoded = self._encode(total, self._inter.rank)
            own[...] = self._decode(encoded, own)
        # Reuse the memory of the received parts, which have been decoded by now.
        self._receive({node: part.size for node, part in self._parts}, SUM)
        for node in self._others:
            self._send(encoded, node, SUM)

    def finish(self) -> None:
        super().finish()
        for node, part in self._parts:
            part[...] = self._decode(self._received[node], part)

    def _encode(self, part: np.ndarray, node: int) -> np.ndarray:
        encoding = self._encoding
        return encoding.codec.compress(
            part, f'{encoding.name}.{self._key}.{node}', encoding.compressor.encoded_type,
            encoding.compressor.encoded_length(part.size))

    def _decode(self, encoded: np.ndarray, part: np.ndarray) -> np.ndarray:
        return self._encoding.codec.decompress(encoded, part.size, part.dtype)

    def _receive(self, sizes: dict[int, int], tag: int) -> None:
        """Start to receive encoded parts; ``sizes`` has the decoded size of each node's part."""
        compressor = self._encoding.compressor
        dtype = np.dtype(compressor.encoded_type)
        ends = [0, *itertools.accumulate(
            compressor.encoded_length(size) * dtype.itemsize for size in sizes.values())]
        self._received = {node: self._memory[begin:end].view(dtype) for node, (begin, end) in zip(
            sizes, itertools.pairwise(ends), strict=True)}
        self._requests = [self._inter.Irecv(encoded.view(np.uint8), node, tag)
                          for node, encoded in self._received.items()]

    def _send(self, encoded: np.ndarray, node: int, tag: int) -> None:
        self._requests.append(self._inter.Isend(encoded.view(np.uint8), node, tag))
