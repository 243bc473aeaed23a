"""For which ended ranks somebody waits in vain, and for which not."""

import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn._diagnostics import rank_progress
from chainermn._diagnostics.rank_progress import Progress

SIZE = MPI.COMM_WORLD.size
OTHERS = {rank for rank in range(SIZE) if rank != MPI.COMM_WORLD.rank}
needs_others = pytest.mark.skipif(SIZE < 2, reason='needs another rank')


@pytest.fixture
def own():
    comm = chainermn.create_communicator('naive')
    yield comm
    comm.finalize()


def ended(calls, count=0, sent=None, received=None):
    """The progress of all other ranks, which is the same."""
    return {rank: Progress({calls.key: count}, {}, {calls.key: sent or {}},
                           {calls.key: received or {}}, None, True) for rank in OTHERS}


def test_who_has_entered_an_operation_is_not_awaited(own):
    own.barrier()
    calls = own.flight_records()[0]
    assert calls.count == calls.entered
    assert rank_progress.awaited(calls, 'barrier', ended(calls, calls.count)) == set()
    assert rank_progress.awaited(calls, 'barrier', ended(calls, calls.count - 1)) == OTHERS
    assert rank_progress.awaited(calls, 'barrier', {}) == set()


def test_a_communicator_that_an_ended_rank_has_freed_is_not_awaited(own):
    calls = own.flight_records()[0]
    freed = {rank: Progress({}, {}, {}, {}, None, True) for rank in OTHERS}
    assert rank_progress.awaited(calls, 'barrier', freed) == set()


@needs_others
def test_messages(own):
    """The last call decides: with which rank, under which tag."""
    own.isend(np.zeros(1), (own.rank + 1) % SIZE, 3)
    before = (own.rank - 1) % SIZE
    own.recv(before, 3)
    calls = own.flight_records()[1]
    assert calls.sent == {((own.rank + 1) % SIZE, 3): 1} and calls.received == {(before, 3): 1}
    me = own.rank
    for sent, awaited in [({(me, 3): 1}, {before}), ({(me, 3): 2}, set()),
                          ({(me, 3): 1, (me, 4): 1}, {before}), ({(before, 3): 5}, {before})]:
        assert rank_progress.awaited(calls, 'recv', ended(calls, sent=sent)) == awaited
    # An operation on another communicator keeps nothing here.
    assert rank_progress.awaited(calls, 'barrier', ended(calls)) == set()
    own.barrier()


@needs_others
def test_of_several_possible_senders_all_have_to_have_ended(own):
    calls = own.flight_records()[1]
    calls.count += 1
    calls.record(('recv_obj', MPI.ANY_SOURCE, MPI.ANY_TAG, None))
    all_ended = ended(calls)
    assert rank_progress.awaited(calls, 'recv_obj', all_ended) == OTHERS
    one_more = all_ended | {max(OTHERS): ended(calls, sent={(own.rank, 9): 1})[max(OTHERS)]}
    assert rank_progress.awaited(calls, 'recv_obj', one_more) == set()
    all_ended.popitem()
    assert rank_progress.awaited(calls, 'recv_obj', all_ended) == set()
    calls.sent[own.rank, 0] += 1  # to itself
    assert rank_progress.awaited(calls, 'recv_obj', ended(calls)) == set()
    own.barrier()


@needs_others
def test_a_message_that_nobody_takes(own):
    calls = own.flight_records()[1]
    other = max(OTHERS)
    calls.count += 1
    calls.record(('send', other, 5, None))
    assert rank_progress.awaited(calls, 'send', ended(calls)) == set()  # it still pickles
    calls.sent[other, 5] += 1
    assert rank_progress.awaited(calls, 'send', ended(calls)) == {other}
    assert rank_progress.awaited(calls, 'send', ended(calls, received={(own.rank, 5): 1})) == set()
    own.barrier()


A, B, C = (('Calls', ranks, 1) for ranks in [(0, 1), (1, 2), (0, 2)])


def at_end(ending, has_agreed=False, **entered):
    return Progress({{'A': A, 'B': B, 'C': C}[name]: n for name, n in entered.items()}, {}, {}, {},
                    ending, has_agreed)


@pytest.mark.parametrize(('ranks', 'expected'), [
    # In a circle.
    ({0: at_end(A, A=1, C=0), 1: at_end(B, A=0, B=1), 2: at_end(C, B=0, C=1)},
     {0, 1, 2}),
    # Rank 2 still runs.
    ({0: at_end(A, A=1, C=0), 1: at_end(B, A=0, B=1)}, set()),
    # Rank 1 has come, and rank 0 is about to notice it.
    ({0: at_end(A, A=1, C=0), 1: at_end(A, A=1, B=1), 2: at_end(C, B=1, C=1)}, set()),
    # Rank 1 takes part in no more exchanges.
    ({0: at_end(A, A=1), 1: at_end(None, True, A=0)}, {0}),
    # It writes a file, and has entered all of them.
    ({0: at_end(A, A=1), 1: at_end(None, True, A=1)}, set()),
])
def test_ranks_that_wait_for_one_another_at_the_end(ranks, expected):
    assert rank_progress.deadlocked(ranks) == expected
