"""Chunks, which a rank processes in phases: pack, reduce, combine, finish, unpack.

All views of the shared window are created once, in the constructor, so that a phase is little more
than the NumPy calls that move the data.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chainermn._process.mpi import MPI
from chainermn._transport.shared_memory.between_nodes import NodeSum, NodeTransfer, Waiting
from chainermn._transport.shared_memory.chunking import ChunkPieces, Piece, within


class Chunk:
    """The phases of a chunk on this rank.

    Args:
        nodes: The transfer of the result between nodes; ``None`` if this rank has no part in it.
    """

    def __init__(self, nodes: NodeTransfer | None) -> None:
        self._nodes = nodes

    def pack(self, arrays: list[np.ndarray]) -> None:
        """Copy the parts of this rank's arrays that other ranks need into the shared window."""

    def reduce(self, arrays: list[np.ndarray], results: list[np.ndarray],
               scale: np.generic | None) -> None:
        """Write this rank's slice of the node's result to the window, and start to send it."""

    def combine(self, scale: np.generic | None) -> None:
        """Combine the slices of all nodes if there are several, and start to send the result."""
        if self._nodes is not None:
            self._nodes.combine(scale)

    def finish(self) -> None:
        """Wait until this rank's slice of the result is complete in the window."""
        if self._nodes is not None:
            self._nodes.finish()

    def unpack(self, arrays: list[np.ndarray], scale: np.generic | None) -> None:
        """Copy the result, times ``scale``, into this rank's arrays."""


class DirectChunk(Chunk):
    """A chunk with few pieces. Each rank sums its slice without packing its own data first.

    Args:
        pieces: The contents of the chunk.
        inputs: The input of each rank of the node.
        rank: The intra rank.
        output: The array for the sums.
        own: Start and end of the slice that this rank reduces; an empty slice if it reduces none.
        nodes: The sum of the slice over all nodes; ``None`` if there is one node or the slice is
            empty.
        is_encoded: Whether nodes send encoded data. If so, the data must be scaled before it is
            encoded. Otherwise it is scaled in ``unpack``, which is faster.
        needed: The pieces that this rank needs; all of them by default.
    """

    def __init__(self, pieces: Sequence[Piece], inputs: Sequence[np.ndarray], rank: int,
                 output: np.ndarray, own: tuple[int, int], nodes: NodeTransfer | None,
                 is_encoded: bool = False, needed: Sequence[Piece] | None = None) -> None:
        super().__init__(nodes)
        begin, end = own
        others = [*within(pieces, 0, begin), *within(pieces, end, output.size)]
        self._packed = [(inputs[rank][piece.place], piece.array, piece.part) for piece in others]
        self._reduced = [
            (output[piece.place], piece.array, piece.part,
             [x[piece.place] for x in inputs[:rank]], [x[piece.place] for x in inputs[rank + 1:]])
            for piece in within(pieces, begin, end)]
        self._unpacked = [(output[piece.place], piece.array, piece.part)
                          for piece in (pieces if needed is None else needed)]
        self._is_encoded = is_encoded

    def pack(self, arrays: list[np.ndarray]) -> None:
        for place, array, part in self._packed:
            place[...] = arrays[array][part]

    def reduce(self, arrays: list[np.ndarray], results: list[np.ndarray],
               scale: np.generic | None) -> None:
        for place, array, part, lower, higher in self._reduced:
            _add([*lower, arrays[array][part], *higher], place)
        if self._nodes is not None:
            self._nodes.start(scale if self._is_encoded else None)

    def combine(self, scale: np.generic | None) -> None:
        super().combine(scale if self._is_encoded else None)

    def unpack(self, arrays: list[np.ndarray], scale: np.generic | None) -> None:
        if scale is None or self._is_encoded:
            for place, array, part in self._unpacked:
                arrays[array][part] = place
        else:
            for place, array, part in self._unpacked:
                np.multiply(place, scale, out=arrays[array][part], casting='same_kind')


class PackedChunk(Chunk):
    """A chunk with many pieces, which are packed and summed as one array.

    Args:
        pieces: The contents of the chunk, side by side.
        inputs, rank, output, own, nodes: See :class:`DirectChunk`.
        needed: The pieces that this rank needs; all of them by default.
    """

    def __init__(self, pieces: Sequence[ChunkPieces], inputs: Sequence[np.ndarray], rank: int,
                 output: np.ndarray, own: tuple[int, int], nodes: NodeTransfer | None,
                 needed: Sequence[ChunkPieces] | None = None) -> None:
        super().__init__(nodes)
        begin, end = own
        self._pieces = pieces
        self._packed = inputs[rank][:output.size]
        self._inputs = [x[begin:end] for x in inputs]
        self._slice = output[begin:end]
        self._unpacked = [(each, each.places(output))
                          for each in (pieces if needed is None else needed)]
        self._is_empty = begin == end

    def pack(self, arrays: list[np.ndarray]) -> None:
        np.concatenate([x for pieces in self._pieces for x in pieces.of(arrays)], None,
                       self._packed, casting='same_kind')

    def reduce(self, arrays: list[np.ndarray], results: list[np.ndarray],
               scale: np.generic | None) -> None:
        if self._is_empty:
            return
        _add(self._inputs, self._slice)
        if self._nodes is not None:
            self._nodes.start(scale)
        elif scale is not None:
            np.multiply(self._slice, scale, out=self._slice)

    def unpack(self, arrays: list[np.ndarray], scale: np.generic | None) -> None:
        _copy(self._unpacked, arrays)


class SentChunk(Chunk):
    """A chunk of one array, sent without a copy between ranks that are alone on their hosts.

    Data is sent directly from the array, and the sum is received directly into the result.

    Args:
        piece: The contents of the chunk.
        inter: Communicator of the ranks.
        received: Buffer for received messages.
        waiting: Used to wait for requests.
    """

    def __init__(self, piece: Piece, inter: MPI.Intracomm, received: np.ndarray, waiting: Waiting
                 ) -> None:
        super().__init__(None)
        self._array, self._part = piece.array, piece.part
        self._inter, self._received, self._waiting = inter, received, waiting

    def reduce(self, arrays: list[np.ndarray], results: list[np.ndarray],
               scale: np.generic | None) -> None:
        self._nodes = NodeSum(self._inter, arrays[self._array][self._part], self._received,
                              self._waiting, results[self._array][self._part])
        self._nodes.start(None)

    def finish(self) -> None:
        super().finish()
        self._nodes = None  # because it refers to the arrays


class CopiedChunk(Chunk):
    """A chunk in which each piece is owned by one rank and copied by all other ranks.

    Args:
        parts: The contents of the chunk: pieces, each with a flag that tells whether this rank
            owns them.
        output: The array for the data, to which the owners write on their node.
        nodes: The transfer of the data between nodes; ``None`` if this rank has no part in it.
    """

    def __init__(self, parts: Sequence[tuple[bool, ChunkPieces]], output: np.ndarray,
                 nodes: NodeTransfer | None) -> None:
        super().__init__(nodes)
        self._packed = [(pieces, output[pieces.place]) for is_own, pieces in parts if is_own]
        self._unpacked = [(pieces, pieces.places(output))
                          for is_own, pieces in parts if not is_own]

    def reduce(self, arrays: list[np.ndarray], results: list[np.ndarray],
               scale: np.generic | None) -> None:
        for pieces, place in self._packed:
            np.concatenate(pieces.of(arrays), None, place)
        if self._nodes is not None:
            self._nodes.start(None)

    def unpack(self, arrays: list[np.ndarray], scale: np.generic | None) -> None:
        _copy(self._unpacked, arrays)


def _copy(unpacked: Sequence[tuple[ChunkPieces, list[np.ndarray]]], arrays: list[np.ndarray]
          ) -> None:
    """Copy pieces from their places in a chunk to the arrays."""
    for pieces, places in unpacked:
        for array, place in zip(pieces.of(arrays), places, strict=True):
            array[...] = place


def _add(terms: Sequence[np.ndarray], out: np.ndarray) -> None:
    """Sum arrays in order."""
    if len(terms) == 1:
        out[...] = terms[0]
        return
    np.add(terms[0], terms[1], out)
    for term in terms[2:]:
        np.add(out, term, out)
