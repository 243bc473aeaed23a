"""The ranks of a communicator in COMM_WORLD: a tuple with a compact pickled form."""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TypeAlias

#: First rank, number of ranks, and step.
_Run: TypeAlias = tuple[int, int, int]


class WorldRanks(tuple[int, ...]):
    """Ranks in COMM_WORLD. In each process, the same ranks are usually the same object.

    The hash is cached because these tuples are parts of keys. They are pickled as runs because each
    watchdog message contains several of them.
    """

    _hash: int | None = None
    _runs: tuple[_Run, ...]

    @classmethod
    def of(cls, ranks: Iterable[int]) -> WorldRanks:
        """Return the object for a sequence of ranks."""
        return _of(_runs_of(ranks))

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash

    def __reduce__(self) -> tuple[Callable[[tuple[_Run, ...]], WorldRanks],
                                  tuple[tuple[_Run, ...]]]:
        return _of, (self._runs,)


@functools.lru_cache(maxsize=1024)
def _of(runs: tuple[_Run, ...]) -> WorldRanks:
    ranks = WorldRanks(first + n * step for first, count, step in runs for n in range(count))
    ranks._runs = runs
    return ranks


def _runs_of(ranks: Iterable[int]) -> tuple[_Run, ...]:
    """Split ranks into runs with a constant step."""
    runs: list[_Run] = []
    for rank in ranks:
        first, count, step = runs[-1] if runs else (0, 0, 1)
        if count == 1:
            runs[-1] = first, 2, rank - first
        elif count and rank == first + count * step:
            runs[-1] = first, count + 1, step
        else:
            runs.append((rank, 1, 1))
    return tuple(runs)
