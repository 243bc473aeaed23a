"""Formats ranks as ranges and as groups with the same value, briefly for any number of ranks."""
from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

_Value = TypeVar('_Value', bound=Hashable)

#: The maximum number of ranges and of groups in a text.
_RANGES, _GROUPS = 8, 12


def ranges(ranks: Sequence[int]) -> list[str]:
    """Format ascending rank numbers as ranges: '0-2', '5'."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ['-'.join(map(str, part)) for part in parts]


def ranks_text(ranks: Sequence[int]) -> str:
    """Format rank numbers: 'rank 3', 'ranks 0-2, 5', 'ranks 0, 2, 4, ..., 98 (50 ranks)'."""
    texts = ranges(ranks)
    if len(texts) > _RANGES:
        texts[_RANGES - 2:] = ['...', f'{texts[-1]} ({len(ranks)} ranks)']
    return f'rank{"s" * (len(ranks) != 1)} {", ".join(texts)}'


def group_ranks(values: Iterable[tuple[int, _Value]]) -> dict[_Value, list[int]]:
    """Group ranks with the same value.

    Args:
        values: Pairs of a rank and its value, such as ``enumerate(values)``.

    Returns:
        The ranks of each value, in the given order.
    """
    groups: dict[_Value, list[int]] = {}
    for rank, value in values:
        groups.setdefault(value, []).append(rank)
    return groups


def select_groups(groups: Mapping[_Value, Sequence[int]], limit: int = _GROUPS
                  ) -> tuple[list[tuple[_Value, Sequence[int]]], str]:
    """Select the groups to show: the smallest ones, which are the outliers, and the largest ones.

    Args:
        groups: Ranks by value.
        limit: The maximum number of groups to show.

    Returns:
        Pairs of a value and its ranks, and a text for the other groups; ``''`` if there are none.
    """
    shown = list(groups.items())
    if len(shown) <= limit:
        return shown, ''
    shown.sort(key=lambda group: len(group[1]))  # stable: groups of the same size keep their order
    cut = (limit + 1) // 2
    omitted = shown[cut:len(shown) - limit + cut]
    del shown[cut:len(shown) - limit + cut]
    n = sum(len(ranks) for _, ranks in omitted)
    return shown, f'... and {len(omitted)} more groups ({n} ranks)'


def group_texts(values: Iterable[tuple[int, str, str]], limit: int = _GROUPS
                ) -> tuple[list[tuple[str, Sequence[int]]], str]:
    """Group ranks with the same text or, if there are too many groups, with the same outline.

    Args:
        values: Tuples of a rank, its text, and its outline: the text without the parts that differ
            on each rank.
        limit: The maximum number of groups to show.

    Returns:
        Same as for :func:`select_groups`.
    """
    values = list(values)
    groups = group_ranks((rank, text) for rank, text, _ in values)
    if len(groups) > limit:
        groups = group_ranks((rank, outline) for rank, _, outline in values)
    return select_groups(groups, limit)


def group_lines(values: Iterable[tuple[int, str]]) -> list[str]:
    """Return one line for each group of ranks with the same text.

    Args:
        values: Pairs of a rank and its text, such as ``enumerate(texts)``.
    """
    shown, more = select_groups(group_ranks(values))
    return [f'  {ranks_text(ranks)}: {text}' for text, ranks in shown] + [f'  {more}'] * bool(more)
