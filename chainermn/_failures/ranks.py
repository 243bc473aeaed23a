"""Formats ranges of ranks."""
from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

_Value = TypeVar('_Value', bound=Hashable)


def ranks_text(ranks: Sequence[int]) -> str:
    """Format rank numbers: 'rank 3', 'ranks 0-2, 5'."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    text = ', '.join('-'.join(map(str, part)) for part in parts)
    return f'rank {text}' if len(ranks) == 1 else f'ranks {text}'


def group_ranks(values: Iterable[tuple[int, _Value]]) -> dict[_Value, list[int]]:
    """Group ranks with equal values.

    Args:
        values: Pairs of a rank and its value, such as ``enumerate(values)``.

    Returns:
        The ranks by value, in the given order.
    """
    groups: dict[_Value, list[int]] = {}
    for rank, value in values:
        groups.setdefault(value, []).append(rank)
    return groups
