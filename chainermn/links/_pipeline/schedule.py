"""Schedules: the order in which each rank runs its stages, which every rank can compute.

Schedules assume a common clock: at each tick, each rank takes one step whose inputs are available.
So ranks that follow their lists of steps and wait for messages cannot deadlock.

- ``'gpipe'``: All forward steps of a rank, then all backward steps.
- ``'1f1b'``: A backward step as soon as one is possible. A stage has at most one more micro-batch
  in progress than there are stages from it to the output, which limits the activations in memory.
  Without the additional micro-batch, a rank would always wait for a message that has just been
  sent.
"""
from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from chainermn.links._pipeline.stages import Stage

Name: TypeAlias = Literal['1f1b', 'gpipe']
NAMES: tuple[Name, ...] = '1f1b', 'gpipe'


class Step(NamedTuple):
    """The forward or backward pass of a micro-batch in a stage."""

    stage: int
    micro_batch: int
    is_forward: bool


@functools.lru_cache(maxsize=64)
def clock_cycles(stages: tuple[Stage, ...], n_micro_batches: int, name: Name,
                 has_backward: bool = True) -> list[dict[int, Step]]:
    """Return the step of each rank at each tick. A rank that waits has no step."""
    done: set[Step] = set()
    cycles = []
    while len(done) < len(stages) * n_micro_batches * (1 + has_backward):
        cycle: dict[int, Step] = {}
        for rank in sorted({stage.rank for stage in stages}):
            local = [stage for stage in stages if stage.rank == rank]
            step = next(_ready(local, stages, n_micro_batches, name, has_backward, done), None)
            if step is not None:
                cycle[rank] = step
        done.update(cycle.values())
        cycles.append(cycle)
    return cycles


def steps_of(rank: int, cycles: Sequence[dict[int, Step]]) -> list[Step]:
    """Return the steps of a rank."""
    return [cycle[rank] for cycle in cycles if rank in cycle]


def _ready(local: Sequence[Stage], stages: Sequence[Stage], n_micro_batches: int, name: Name,
           has_backward: bool, done: set[Step]) -> Iterator[Step]:
    """Yield the steps that a rank can take now, starting with the best one."""
    forward, backward = [], []
    for stage in sorted(local, key=lambda stage: stage.height):
        n_forward, n_backward = (
            sum(Step(stage.number, k, direction) in done for k in range(n_micro_batches))
            for direction in (True, False))
        is_open = name == 'gpipe' or not has_backward or (
            n_forward - n_backward < stage.height + (stage.height > 1))
        if n_forward < n_micro_batches and is_open and all(
                Step(edge.source, n_forward, True) in done for edge in stage.edges_in):
            forward.append(Step(stage.number, n_forward, True))
        if has_backward and n_backward < n_forward and all(
                Step(edge.dest, n_backward, False) in done for edge in stage.edges_out):
            backward.append(Step(stage.number, n_backward, False))
    if name == '1f1b':
        yield from backward
        yield from forward
    else:
        yield from forward
        if all(Step(stage.number, n_micro_batches - 1, True) in done for stage in local):
            yield from backward
