"""Schedules as lists of steps, compared with the figures in papers."""

import itertools

import numpy as np
import pytest
from each_case import each_case

from chainermn.links._pipeline.schedule import NAMES, Step, clock_cycles, steps_of
from chainermn.links._pipeline.stages import ListedLink as Part
from chainermn.links._pipeline.stages import connect

pytestmark = pytest.mark.mpi_skip


def chain(n_ranks, n_links=1):
    """Links in a ring: stage n is on rank n % n_ranks."""
    n = n_ranks * n_links
    return connect([[Part(f'{stage}', [(stage - 1) % n_ranks] if stage else None,
                          [(stage + 1) % n_ranks] if stage < n - 1 else None)
                     for stage in range(rank, n, n_ranks)] for rank in range(n_ranks)])


def written(rank, cycles):
    """Return the steps of a rank as text."""
    return ' '.join('BF'[step.is_forward] + str(step.micro_batch)
                    for step in steps_of(rank, cycles))


@pytest.mark.parametrize('name, expected', [
    ('1f1b', ['F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5', 'F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5',
              'F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5', 'F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5']),
    ('gpipe', ['F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5'] * 4)])
def test_four_stages(name, expected):
    """As in the papers on GPipe and PipeDream-Flush; 1F1B with one more step ahead."""
    cycles = clock_cycles(chain(4), 6, name)
    assert [written(rank, cycles) for rank in range(4)] == expected


@each_case('n_stages, n, name', itertools.product([1, 2, 3, 4, 7], [1, 2, 5, 8, 16], NAMES))
def test_bubbles_are_the_least_possible(n_stages, n, name):
    cycles = clock_cycles(chain(n_stages), n, name)
    assert len(cycles) == 2 * (n + n_stages - 1)


@each_case('n_stages, n', itertools.product([2, 4], [8, 16]))
def test_memory_does_not_grow_with_the_number_of_micro_batches(n_stages, n):
    cycles = clock_cycles(chain(n_stages), n, '1f1b')
    for rank in range(n_stages):
        kept = np.cumsum([1 if step.is_forward else -1 for step in steps_of(rank, cycles)])
        assert max(kept) == n_stages - rank + (rank < n_stages - 1)


@pytest.mark.parametrize('latency', [.1, .3])
def test_messages_arrive_while_ranks_compute(latency):
    """Ranks wait for the first and the last message only."""
    stages = chain(2)
    orders = [steps_of(rank, clock_cycles(stages, 16, '1f1b')) for rank in range(2)]
    ends, times = {}, [0., 0.]
    while any(orders):
        for rank, order in enumerate(orders):
            needs = order and (Step(rank - 1, order[0].micro_batch, True) if order[0].is_forward
                               else Step(rank + 1, order[0].micro_batch, False))
            if order and (needs in ends or needs.stage not in (0, 1)):
                times[rank] = ends[order[0]] = max(
                    times[rank], ends.get(needs, -latency) + latency) + 2 - order[0].is_forward
                order.pop(0)
    assert max(times) == pytest.approx(3 * (16 + 1) + 2 * latency)


def test_forward_only():
    cycles = clock_cycles(chain(3), 4, '1f1b', has_backward=False)
    assert len(cycles) == 4 + 3 - 1
    assert written(1, cycles) == 'F0 F1 F2 F3'

