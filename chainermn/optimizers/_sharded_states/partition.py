"""Partitions the parameters of a model over the ranks, for sharded optimizer states."""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

#: Begin and end of the elements of a parameter, in C order.
Range = tuple[int, int]

#: The elements that belong to one rank, by path of the parameter.
Shard = dict[str, Range]

#: A parameter is only split at multiples of this number of elements.
_ALIGNMENT = 64

_UNSPLITTABLE = 'cannot be split (not elementwise, or with hooks)'


class Item(NamedTuple):
    """A parameter to assign to ranks."""

    path: str
    size: int  # number of elements
    is_divisible: bool  # false for rules that are not elementwise or have hooks
    is_enabled: bool  # disabled parameters have no state, so they are balanced separately
    is_tied: bool = False  # whether it shares memory with another parameter

    @property
    def description(self) -> str:
        """The properties that must be the same on all ranks, as text."""
        return (f'{"enabled" if self.is_enabled else "disabled"}, '
                f'{"can be split" if self.is_divisible else _UNSPLITTABLE}, '
                f'{self.size} elements{" sharing memory with another parameter" * self.is_tied}')


def partition(items: Sequence[Item], n: int) -> list[Shard]:
    """Assign every element of every parameter to one of ``n`` ranks.

    Each rank gets about the same number of elements. Indivisible parameters are assigned first,
    starting with the largest. Parameters that share memory are assigned to every rank, because an
    update of one changes the others, so they must be updated together.

    Args:
        items: The parameters, in the same order on all ranks.
        n: Number of ranks.

    Returns:
        The shard of each rank; the same on all ranks.
    """
    shards: list[Shard] = [{item.path: (0, item.size) for item in items if item.is_tied}
                           for _ in range(n)]
    items = [item for item in items if not item.is_tied]
    for is_enabled in (True, False):
        group = [item for item in items if item.is_enabled == is_enabled]
        loads = [0] * n
        for item in sorted((item for item in group if not item.is_divisible),
                           key=lambda item: -item.size):
            rank = loads.index(min(loads))
            shards[rank][item.path] = 0, item.size
            loads[rank] += item.size
        _split([item for item in group if item.is_divisible], loads, shards)
    return shards


def _split(items: Sequence[Item], loads: Sequence[int], shards: Sequence[Shard]) -> None:
    """Split parameters one after another, so that all ranks end up with about the same load."""
    total = sum(item.size for item in items)
    # Where the elements of each rank end in the concatenated parameters.
    ends = [*itertools.accumulate(_shares(total, loads))]
    start = rank = 0
    for item in items:
        begin = 0
        while begin < item.size:
            while rank < len(ends) - 1 and start + begin >= ends[rank]:
                rank += 1
            end = item.size
            if rank < len(ends) - 1 and ends[rank] - start < item.size:
                end = min(item.size, -(-(ends[rank] - start) // _ALIGNMENT) * _ALIGNMENT)
            shards[rank][item.path] = begin, end
            begin = end
        start += item.size


def _shares(total: int, loads: Sequence[int]) -> list[int]:
    """Distribute ``total`` elements so that the largest load is as small as possible."""
    shares = [0] * len(loads)
    order = sorted(range(len(loads)), key=loads.__getitem__)
    for count in range(len(order), 0, -1):  # the ranks with the least load get a share
        lowest = order[:count]
        level, rest = divmod(total + sum(loads[rank] for rank in lowest), count)
        if level >= loads[lowest[-1]]:
            for i, rank in enumerate(lowest):
                shares[rank] = level - loads[rank] + (i < rest)
            break
    return shares
