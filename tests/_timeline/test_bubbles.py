"""Bubbles of a run whose times are known."""

import pytest

from chainermn._timeline import bubbles
from chainermn._timeline.trace_files import Event, RankTrace, Run

pytestmark = pytest.mark.mpi_skip


def step(name, stage, k, begin, end):
    return Event(f'{name} of stage {stage}, micro-batch {k}', '', 0, begin, end, {})


def test_two_ranks_and_two_calls():
    """Forward and backward take a second each."""
    ranks = []
    for rank in range(2):
        events = []
        for start in (0, 100):
            ticks = [(0, 'forward', 0), (1, 'forward', 1), (3, 'backward', 0),
                     (5, 'backward', 1)] if rank == 0 else [
                (1, 'forward', 0), (2, 'backward', 0), (3, 'forward', 1), (4, 'backward', 1)]
            events += [step(name, rank, k, start + tick, start + tick + 1)
                       for tick, name, k in ticks]
        ranks.append(RankTrace(rank, '', {}, events, True))
    run = Run(ranks, 106, 0, [])
    found = bubbles.measure(run)
    assert found == bubbles.Bubbles(2, 2, pytest.approx(1 - 8 / 12))
    assert found.least == pytest.approx(1 / 3)
    assert bubbles.text(run) == [
        'Pipeline of 2 ranks, 2 micro-batches: bubbles took 33% of the time of its calls; the '
        'minimum is (S - 1) / (M + S - 1) = 33%.']


def test_other_runs():
    assert bubbles.text(Run([RankTrace(0, '', {}, [Event('forward', '', 0, 0, 1, {})], True)],
                            1, 0, [])) == []
    assert bubbles.column('backward of stage 3, micro-batch 12') == 'backward'
    assert bubbles.column('forward of stage') == 'forward of stage'
