"""Rank numbers in words."""
from __future__ import annotations

from collections.abc import Sequence


def ranks_text(ranks: Sequence[int]) -> str:
    """Writes rank numbers in words: 'rank 3', 'ranks 0-2, 5'."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    text = ', '.join('-'.join(map(str, part)) for part in parts)
    return f'rank {text}' if len(ranks) == 1 else f'ranks {text}'
