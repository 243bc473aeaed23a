"""The wait-for graph of many ranks finds the same deadlocks as the definition."""

import random

import pytest
from simulated_ranks import (
    SimulatedRank,
    chain,
    in_collective,
    in_receive,
    one_missing,
    ring,
    two_groups,
)

from chainermn._diagnostics.deadlocks.rank_state import WaitKind
from chainermn._diagnostics.deadlocks.wait_graph import WaitGraph

pytestmark = pytest.mark.mpi_skip


def states(ranks):
    """The states of the ranks that wait."""
    return {each.rank: each.state for each in ranks if each.state.threads[0].waits}


def receive_of_any(size, rank, tag=-1, **counts):
    return SimulatedRank(size, rank, 'recv', wait=(WaitKind.RECEIVE, 0, -1, tag), **counts)


def sending(size, rank, peer):
    return SimulatedRank(size, rank, 'send', wait=(WaitKind.SEND, 0, peer, 5), sent={(peer, 5): 1})


def any_of_all(size):
    return [receive_of_any(size, rank) for rank in range(size)]


def workers(size):
    """All ranks but the first wait for its messages, of which one is in flight."""
    first = receive_of_any(size, 0, sent={(rank, 5): 1 for rank in range(1, size - 1)})
    return [first, *(in_receive(size, rank, 0, received={(0, 5): 1}) for rank in range(1, size))]


@pytest.mark.parametrize(('job', 'n'), [
    (one_missing, 0), (chain, 0), (ring, 1024), (two_groups, 1024), (any_of_all, 1024),
    (workers, 1024),
])
def test_many_ranks(job, n):
    graph = WaitGraph(states(job(1024)))
    deadlocked = graph.deadlocked()
    assert len(deadlocked) == n
    if n:
        text, _ = graph.cycle(deadlocked).splitlines()
        assert text.startswith('rank 0 waits in recv ') and len(text) < 250


def random_rank(rng, size, rank):
    others = [each for each in range(size) if each != rank]
    sent = {(rng.choice(others), 5): 1} if rng.random() < .2 else {}
    return rng.choice([
        lambda: in_collective(size, rank, rng.randrange(3)),
        lambda: in_receive(size, rank, rng.choice(others), sent=sent),
        lambda: in_receive(size, rank, rng.choice(others), sent=sent),
        lambda: receive_of_any(size, rank, sent=sent),
        lambda: receive_of_any(size, rank, 5, sent=sent),
        lambda: sending(size, rank, rng.choice(others)),
        lambda: SimulatedRank(size, rank, ''),
    ])()


def by_definition(ranks):
    """Remove ranks that may make progress until none is left."""
    size, waiting = len(ranks), {each.rank for each in ranks if each.state.threads[0].waits}

    def count(counts, peer, tag):
        return sum(n for (other, theirs), n in next(iter(counts.values())).items()
                   if other == peer and tag in (theirs, -1))

    def may_proceed(rank):
        wait, = ranks[rank].state.threads[0].waits
        if wait.kind is WaitKind.COLLECTIVE:
            return not any(next(iter(ranks[each].progress.entered.values())) < wait.number
                           for each in waiting)
        if wait.kind is WaitKind.SEND:
            return wait.peer not in waiting
        peers = range(size) if wait.peer < 0 else [wait.peer]
        return any(ranks[each].state.threads[0].waits == () or each not in waiting
                   or count(ranks[each].progress.sent, rank, wait.tag) for each in peers)

    while free := {rank for rank in waiting if may_proceed(rank)}:
        waiting -= free
    return waiting


def test_random_jobs():
    found = 0
    for seed in range(200):
        rng = random.Random(seed)
        size = rng.randrange(2, 9)
        ranks = [random_rank(rng, size, rank) for rank in range(size)]
        expected = by_definition(ranks)
        assert WaitGraph(states(ranks)).deadlocked() == expected, seed
        found += bool(expected)
    assert 25 < found < 175

