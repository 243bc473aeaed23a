"""Assigns arrays, each owned by a rank, to chunks: every rank has a share of each chunk.

So all nodes send and receive at the same time instead of one after another.
"""
from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

#: Parts begin at multiples of this number of elements, if chunks are long enough.
_ALIGNMENT = 64


class Part(NamedTuple):
    """``array[start:stop]`` of flat array number ``array``."""

    array: int
    start: int
    stop: int


def fits(nodes: Sequence[int], length: int) -> bool:
    """Return whether chunks of ``length`` elements have room for a part of every rank.

    Args:
        nodes: The node of each rank.
        length: The maximum number of elements in a chunk.
    """
    return 2 * _ranks_by_node(nodes) <= length


@functools.lru_cache(maxsize=64)
def assigned(sizes: tuple[int, ...], owners: tuple[int, ...], nodes: tuple[int, ...], length: int
             ) -> list[list[list[Part]]]:
    """Assign arrays to chunks.

    Args:
        sizes: The number of elements of each array.
        owners: The rank to which each array belongs.
        nodes: The node of each rank.
        length: The maximum number of elements in a chunk. It must pass :func:`fits`.

    Returns:
        For each chunk, the parts of each rank, in the order of the arrays. The parts of a node have
        at most ``length`` elements, divided by the number of nodes.
    """
    alignment = _ALIGNMENT if fits(nodes, length // _ALIGNMENT) else 1
    ranks_of = collections.Counter(nodes)
    loads, node_loads = [0] * len(nodes), dict.fromkeys(ranks_of, 0)
    for size, owner in zip(sizes, owners, strict=True):
        loads[owner] += size
        node_loads[nodes[owner]] += size
    # A part is longer than its share by less than `alignment` elements.
    count = max(-(-load // (length // len(ranks_of) - alignment * ranks_of[node]))
                for node, load in node_loads.items())
    by_rank = [
        _cut([(array, sizes[array]) for array, owner in enumerate(owners) if owner == rank],
             [*(load * chunk // count // alignment * alignment for chunk in range(1, count)), load])
        for rank, load in enumerate(loads)] if count else []
    return [*map(list, zip(*by_rank, strict=True))]


def _ranks_by_node(nodes: Sequence[int]) -> int:
    """Return the number of ranks that there would be if all nodes were as large as the largest."""
    ranks_of = collections.Counter(nodes)
    return max(ranks_of.values()) * len(ranks_of)


def _cut(arrays: Sequence[tuple[int, int]], ends: Sequence[int]) -> list[list[Part]]:
    """Cut arrays, laid end to end, at ``ends``; return the parts before each.

    Args:
        arrays: The number and the size of each array.
        ends: Positions in ascending order, possibly repeated; the last one is the total size.
    """
    found: list[list[Part]] = [[] for _ in ends]
    starts = itertools.accumulate((size for _, size in arrays), initial=0)
    chunk = 0
    for (array, size), first in zip(arrays, starts, strict=False):
        start = 0
        while start < size:
            while ends[chunk] <= first + start:
                chunk += 1
            stop = min(size, ends[chunk] - first)
            found[chunk].append(Part(array, start, stop))
            start = stop
    return found
