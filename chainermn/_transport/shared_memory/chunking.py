"""Divides arrays, laid end to end, into chunks of equal length."""
from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from chainermn._transport import packing
from chainermn._transport.owned_parts import Part

#: Number of elements to which slice borders are rounded, so that no two ranks write to the same
#: cache line.
ALIGNMENT = 16


class Piece(NamedTuple):
    """A range of an array and its place in a chunk.

    ``[start:stop]`` of flat array number ``array`` is at ``chunk[begin:end]``.
    """

    array: int
    start: int
    stop: int
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.stop - self.start

    @property
    def part(self) -> slice:
        """The range in the array."""
        return slice(self.start, self.stop)

    @property
    def place(self) -> slice:
        """The range in the chunk."""
        return slice(self.begin, self.end)


def cut(sizes: Sequence[int], length: int, first: Collection[int] = ()) -> list[list[Piece]]:
    """Split arrays, laid end to end, into chunks.

    Args:
        sizes: Number of elements of each array.
        length: Number of elements of a chunk. The last chunk may be shorter, and so may the chunk
            before an array in ``first``.
        first: Indices of arrays that begin a new chunk.

    >>> cut([3, 2], 4)
    [[Piece(array=0, start=0, stop=3, begin=0), Piece(array=1, start=0, stop=1, begin=3)],
     [Piece(array=1, start=1, stop=2, begin=0)]]
    """
    chunks: list[list[Piece]] = []
    filled = length
    for array, size in enumerate(sizes):
        start = 0
        if array in first:
            filled = length
        while start < size:
            if filled == length:
                chunks.append([])
                filled = 0
            stop = min(size, start + length - filled)
            chunks[-1].append(Piece(array, start, stop, filled))
            filled += stop - start
            start = stop
    return chunks


def within(pieces: Sequence[Piece], begin: int, end: int) -> list[Piece]:
    """Return the parts of the pieces that lie within ``chunk[begin:end]``."""
    clipped = []
    for piece in pieces:
        low, high = max(piece.begin, begin), min(piece.end, end)
        if low < high:
            shift = piece.start - piece.begin
            clipped.append(Piece(piece.array, low + shift, high + shift, low))
    return clipped


def slices(length: int, count: int) -> list[tuple[int, int]]:
    """Divide a chunk into ``count`` slices (begin, end) of similar length; some may be empty."""
    borders = [length * i // count // ALIGNMENT * ALIGNMENT for i in range(count)] + [length]
    return list(itertools.pairwise(borders))


class OwnedSlice(NamedTuple):
    """A slice of a chunk in which each piece is owned by a rank.

    The pieces of a node are side by side.

    Attributes:
        pieces: The pieces, in the order of the nodes and ranks.
        borders: The start of each node's part in the chunk, followed by the end of the slice.
    """

    pieces: list[Piece]
    borders: list[int]

    @property
    def begin(self) -> int:
        return self.borders[0]

    @property
    def end(self) -> int:
        return self.borders[-1]

    def parts(self, chunk: np.ndarray) -> list[np.ndarray]:
        """Return the part of each node."""
        return [chunk[begin:end] for begin, end in itertools.pairwise(self.borders)]

    def runs(self, owners: Sequence[int]) -> list[list[Piece]]:
        """Group adjacent pieces of consecutive arrays that have the same owner."""
        numbered = itertools.groupby(enumerate(self.pieces), lambda each: (
            owners[each[1].array], each[1].array - each[0]))
        return [[piece for _, piece in run] for _, run in numbered]


def owned_slices(parts: Sequence[Sequence[Part]], nodes: Sequence[int], count: int
                 ) -> list[OwnedSlice]:
    """Lay the parts of a chunk side by side, with a share of each node's parts in each slice.

    Args:
        parts: The parts that each rank owns.
        nodes: The node of each rank.
        count: The number of slices.
    """
    areas: list[list[Piece]] = [[] for _ in {*nodes}]
    for of_rank, node in zip(parts, nodes, strict=True):
        area = areas[node]
        for part in of_rank:
            area.append(Piece(*part, area[-1].end if area else 0))
    divided = [slices(area[-1].end if area else 0, count) for area in areas]
    found, position = [], 0
    for number in range(count):
        pieces, borders = [], [position]
        for area, ends in zip(areas, divided, strict=True):
            begin, end = ends[number]
            pieces += [piece._replace(begin=piece.begin - begin + position)
                       for piece in within(area, begin, end)]
            position += end - begin
            borders.append(position)
        found.append(OwnedSlice(pieces, borders))
    return found


class ChunkPieces:
    """Adjacent pieces of a chunk, which are a slice of a list of arrays.

    All pieces except the first and the last are complete arrays, with any shape and memory layout.

    Attributes:
        flat: The indices of the arrays of which only a part is in the chunk. They must be flat.
        place: The range in the chunk.
    """

    def __init__(self, pieces: Sequence[Piece], shapes: Sequence[tuple[int, ...]]) -> None:
        partial = [piece for piece in pieces
                   if piece.stop - piece.start < math.prod(shapes[piece.array])]
        self.flat = [piece.array for piece in partial]
        self.place = slice(pieces[0].begin, pieces[-1].end)
        self._first = [piece for piece in partial if piece is pieces[0]]
        self._last = [piece for piece in partial if piece is not pieces[0]]
        first = pieces[0].array + len(self._first)
        stop = pieces[-1].array + 1 - len(self._last)
        self._complete = slice(first, max(first, stop))
        self._shapes: list[tuple[int, ...]] = [(piece.stop - piece.start,) for piece in self._first]
        self._shapes += shapes[self._complete]
        self._shapes += [(piece.stop - piece.start,) for piece in self._last]

    def of(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Return the pieces as views of the arrays; some of them may be empty."""
        return [*[arrays[piece.array][piece.part] for piece in self._first],
                *arrays[self._complete],
                *[arrays[piece.array][piece.part] for piece in self._last]]

    def places(self, chunk: np.ndarray) -> list[np.ndarray]:
        """Return the pieces as views of the chunk."""
        return packing.parts(chunk[self.place], self._shapes)
