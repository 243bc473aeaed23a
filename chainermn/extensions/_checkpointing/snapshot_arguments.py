"""Checks the arguments of ``multi_node_snapshot``."""
from __future__ import annotations

import operator
from collections.abc import Iterable

from chainermn.communicators._recognize import as_communicator, is_communicator


def check_order(*arguments: object) -> None:
    """Raise TypeError, on all ranks if possible, if the arguments have wrong types or positions."""
    comm, snapshot, sets = arguments
    is_in_order = is_communicator(comm) and not hasattr(sets, 'filename')
    filename = getattr(snapshot, 'filename', None)
    if is_in_order and callable(snapshot) and (isinstance(filename, str) or callable(filename)):
        return
    function = getattr(snapshot, '__name__', '')
    kind = f'function {function}' if function else type(snapshot).__name__
    error = TypeError(
        'multi_node_snapshot needs a snapshot such as extensions.snapshot(), whose attribute '
        f'filename is a string or a function; the {kind} has '
        + (f'filename={filename!r}' if hasattr(snapshot, 'filename') else 'no filename')
        + (f'. Call it: {function}().' if function else '.')
    ) if is_in_order else TypeError(
        'multi_node_snapshot takes a communicator, a snapshot and the replica sets, in this order: '
        'multi_node_snapshot(comm, extensions.snapshot()). It got '
        + ', '.join(type(argument).__name__ for argument in arguments) + '.')
    for argument in arguments:
        if is_communicator(argument):
            as_communicator(argument, 'multi_node_snapshot').refuse('multi_node_snapshot', error)
    raise error


def parse_replica_sets(replica_sets: Iterable[int | Iterable[int]], size: int) -> list[set[int]]:
    """Return disjoint sets that together contain every rank."""
    try:
        sets = [{*map(operator.index, ranks if isinstance(ranks, Iterable) else [ranks])}
                for ranks in replica_sets]
    except TypeError as error:
        raise TypeError('replica_sets must be a list of ranks or iterables of ranks, such as '
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
