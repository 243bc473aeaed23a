"""Sets of ranks that have the same state, as a program gives them."""
from __future__ import annotations

import operator
from collections.abc import Iterable


def parse_replica_sets(replica_sets: Iterable[int | Iterable[int]], size: int) -> list[set[int]]:
    """Return disjoint sets that hold every rank once."""
    try:
        sets = [{*map(operator.index, ranks if isinstance(ranks, Iterable) else [ranks])}
                for ranks in replica_sets]
    except TypeError as error:
        raise TypeError('replica_sets must be a list of ranks and of iterables of ranks, such as '
                        f'[[0, 1], 2], not {replica_sets!r}: {error}') from error
    sets = [ranks for ranks in sets if ranks]
    named = [rank for ranks in sets for rank in ranks]
    for rank in named:
        if not 0 <= rank < size:
            raise AssertionError(
                f'replica_sets has rank {rank}, but there are only ranks 0 to {size - 1}')
    if len(set(named)) != len(named):
        raise AssertionError(f'a rank can only be in one replica set, but replica_sets is {sets}')
    rest = set(range(size)) - set(named)
    return [*sets, rest] if rest else sets
