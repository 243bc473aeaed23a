"""Bubbles of a pipeline: the time in which its ranks wait for micro-batches from each other."""
from __future__ import annotations

import collections
import re
from typing import NamedTuple

from chainermn._timeline.trace_files import Event, RankTrace, Run

#: The spans of :class:`chainermn.Pipeline`.
_STEP = re.compile(r'(forward|backward) of stage (\d+), micro-batch (\d+)')


class Bubbles(NamedTuple):
    """The bubble fraction: the share of bubbles in the time of all calls of a pipeline."""

    n_ranks: int
    n_micro_batches: int  # in the largest call
    share: float

    @property
    def least(self) -> float:
        """The share if all steps take equally long and messages take no time."""
        return (self.n_ranks - 1) / (self.n_micro_batches + self.n_ranks - 1)


def column(name: str) -> str:
    """Return the name under which the time of a span is summed."""
    match = _STEP.fullmatch(name)
    return match[1] if match else name


def measure(run: Run) -> Bubbles | None:
    """Return the bubbles of a run, or ``None`` if it has no pipeline."""
    calls: dict[int, list[list[Event]]] = collections.defaultdict(list)  # by number, and rank
    n_micro_batches = 0
    for rank in run.ranks:
        for number, steps in enumerate(_calls(rank)):
            calls[number].append(steps)
            n_micro_batches = max(n_micro_batches, len({_numbers(step)[1] for step in steps}))
    total = busy = 0.
    for ranks in calls.values():
        seconds = max(steps[-1].end for steps in ranks) - min(steps[0].begin for steps in ranks)
        total += seconds * len(ranks)
        busy += sum(step.seconds for steps in ranks for step in steps)
    n_ranks = max(map(len, calls.values()), default=0)
    return Bubbles(n_ranks, n_micro_batches, 1 - busy / total) if total else None


def text(run: Run) -> list[str]:
    """Return a line about the bubbles, if there is a pipeline."""
    found = measure(run)
    if found is None:
        return []
    return [f'Pipeline of {found.n_ranks} ranks, {found.n_micro_batches} micro-batches: '
            f'bubbles took {found.share:.0%} of the time of its calls; the minimum is '
            f'(S - 1) / (M + S - 1) = {found.least:.0%}.']


def _calls(rank: RankTrace) -> list[list[Event]]:
    """Return the steps of each call. A step that has already occurred begins the next call."""
    calls: list[list[Event]] = []
    seen: set[str] = set()
    for event in rank.events:
        if event.row == 0 and not event.category and _STEP.fullmatch(event.name):
            if event.name in seen or not calls:
                calls.append([])
                seen.clear()
            seen.add(event.name)
            calls[-1].append(event)
    return calls


def _numbers(step: Event) -> tuple[int, int]:
    match = _STEP.fullmatch(step.name)
    assert match is not None
    return int(match[2]), int(match[3])
