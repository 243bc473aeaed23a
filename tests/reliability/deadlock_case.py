"""What the files of deadlocks have in common: the decorator, bystanders and arrays.

A comment marks the line in which a rank waits forever, in the operation that the line calls::

    comm.recv(1, 0)  # 0 waits for 1
    y.backward()     # in backward of chainermn.functions.send: 0 waits for 1

``1 and 2`` are ranks that it waits for; of ``1 or 2``, one would be enough. Parentheses, as in
``# (2 waits for 0)``, mark a rank that need not be named: a deadlock blocks it without being a part
of it, or there are several cycles.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import chainer
import numpy as np

ARRAY = np.ones(3, 'f')
LARGE = np.ones(1 << 21, 'f')
#: By name.
CASES: dict[str, Deadlock] = {}


class Wait(NamedTuple):
    """A rank that waits forever in a line."""

    line: str  # file and number
    ranks: frozenset[int]  # that it waits for
    is_any: bool  # whether one of them is enough
    operation: str
    is_part: bool  # of the deadlock


class Deadlock(NamedTuple):
    """A program that deadlocks."""

    play: Callable[..., Any]
    ranks: tuple[int, ...]  # sizes of jobs
    n: int  # the number of ranks that take part
    needs_timeout: bool  # whether only a timeout ends it

    def waits(self) -> dict[int, list[Wait]]:
        """The marks in its source, by rank; several if threads of a rank wait."""
        lines, first = inspect.getsourcelines(self.play)
        file = inspect.getsourcefile(self.play).rpartition('/')[2]
        found: dict[int, list[Wait]] = {}
        for number, line in enumerate(lines, first):
            code, _, comment = line.partition('  # ')
            named = re.match(r'in ([\w. ]+): ', comment)
            operation = named[1] if named else re.findall(r'\.(\w+)\(|$', code)[-2:][0]
            for is_blocked, rank, ranks in re.findall(
                    r'(\(?)(\d) waits for (\d(?: (?:or|and) \d)*)', comment):
                found.setdefault(int(rank), []).append(Wait(
                    f'{file}:{number}', frozenset(map(int, re.findall(r'\d', ranks))),
                    ' or ' in ranks, operation, not is_blocked))
        return found


def deadlock(n: int, bystanders: int = 0, needs_timeout: bool = False) -> Callable[..., Any]:
    """Add a program to the catalogue.

    Args:
        n: The number of ranks that take part.
        bystanders: The number of ranks that the job may have in addition: one is in a barrier, the
            other one computes.
        needs_timeout: Whether it is not detected, and only a timeout ends it.
    """
    def decorate(play: Callable[..., Any]) -> Callable[..., Any]:
        name = play.__name__.strip('_').replace('_', ' ')
        assert name not in CASES
        CASES[name] = Deadlock(play, tuple(range(n, n + bystanders + 1)), n, needs_timeout)
        return play
    return decorate


def stand_by(comm: Any, n: int) -> None:
    """Wait in a barrier, or computes: not a part of the deadlock."""
    if comm.rank == n:
        comm.barrier()
    while True:
        time.sleep(.01)


def model() -> Any:
    """A model with gradients, equal on all ranks."""
    found = chainer.links.Linear(3, 3, initialW=1)
    found.cleargrads()
    for param in found.params():
        param.grad = param.array
    return found


def loss(link: Any) -> Callable[[], Any]:
    """A loss of a model."""
    return lambda: chainer.functions.sum(link(ARRAY[None]))
