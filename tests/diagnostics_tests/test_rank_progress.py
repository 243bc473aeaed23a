"""Finished ranks that an operation waits for in vain, and those that it does not wait for."""

import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn._diagnostics import flight_recorder, rank_progress
from chainermn._diagnostics.rank_progress import Progress

SIZE = MPI.COMM_WORLD.size
OTHERS = {rank for rank in range(SIZE) if rank != MPI.COMM_WORLD.rank}
needs_others = pytest.mark.skipif(SIZE < 2, reason='needs another rank')


@pytest.fixture
def own():
    comm = chainermn.create_communicator('naive')
    yield comm
    comm.finalize()


def finished(calls, count=0, sent=None, received=None):
    """The progress of all other ranks, which is the same."""
    return {rank: Progress({calls.key: count}, {}, {calls.key: sent or {}},
                           {calls.key: received or {}}, None, True) for rank in OTHERS}


def test_ranks_that_have_entered_the_operation_are_not_awaited(own):
    own.barrier()
    calls = own.flight_records()[0]
    assert calls.count == calls.entered
    assert rank_progress.awaited(calls, 'barrier', finished(calls, calls.count)) == set()
    assert rank_progress.awaited(calls, 'barrier', finished(calls, calls.count - 1)) == OTHERS
    assert rank_progress.awaited(calls, 'barrier', {}) == set()


def test_ranks_that_have_freed_the_communicator_are_not_awaited(own):
    calls = own.flight_records()[0]
    freed = {rank: Progress({}, {}, {}, {}, None, True) for rank in OTHERS}
    assert rank_progress.awaited(calls, 'barrier', freed) == set()


@needs_others
def test_recv_awaits_a_sender_unless_its_message_is_in_flight(own):
    """The last call decides: with which rank, under which tag."""
    own.isend(np.zeros(1), (own.rank + 1) % SIZE, 3)
    before = (own.rank - 1) % SIZE
    own.recv(before, 3)
    calls = own.flight_records()[1]
    assert calls.sent == {((own.rank + 1) % SIZE, 3): 1} and calls.received == {(before, 3): 1}
    me = own.rank
    for sent, awaited in [({(me, 3): 1}, {before}), ({(me, 3): 2}, set()),
                          ({(me, 3): 1, (me, 4): 1}, {before}), ({(before, 3): 5}, {before})]:
        assert rank_progress.awaited(calls, 'recv', finished(calls, sent=sent)) == awaited
    # An operation on another communicator keeps nothing here.
    assert rank_progress.awaited(calls, 'barrier', finished(calls)) == set()
    own.barrier()


@needs_others
def test_recv_from_any_rank_awaits_them_once_all_have_finished(own):
    calls = own.flight_records()[1]
    calls.count += 1
    calls.record(('recv_obj', MPI.ANY_SOURCE, MPI.ANY_TAG, None))
    all_finished = finished(calls)
    assert rank_progress.awaited(calls, 'recv_obj', all_finished) == OTHERS
    one_more = all_finished | {max(OTHERS): finished(calls, sent={(own.rank, 9): 1})[max(OTHERS)]}
    assert rank_progress.awaited(calls, 'recv_obj', one_more) == set()
    all_finished.popitem()
    assert rank_progress.awaited(calls, 'recv_obj', all_finished) == set()
    calls.sent[own.rank, 0] += 1  # to itself
    assert rank_progress.awaited(calls, 'recv_obj', finished(calls)) == set()
    own.barrier()


@needs_others
def test_send_awaits_a_receiver_that_has_not_received_it(own):
    calls = own.flight_records()[1]
    other = max(OTHERS)
    calls.count += 1
    calls.record(('send', other, 5, None))
    assert rank_progress.awaited(calls, 'send', finished(calls)) == set()  # it still pickles
    calls.sent[other, 5] += 1
    assert rank_progress.awaited(calls, 'send', finished(calls)) == {other}
    received = {(own.rank, 5): 1}
    assert rank_progress.awaited(calls, 'send', finished(calls, received=received)) == set()
    own.barrier()


@needs_others
def test_create_communicator_awaits_ranks_that_have_not_called_it():
    calls = flight_recorder.CreationRecord(MPI.COMM_WORLD)
    try:
        n = flight_recorder.creations[calls.ranks]
        for created, awaited in [(n, set()), (n - 1, OTHERS)]:
            progress = Progress({}, {calls.ranks: created}, {}, {}, None, True)
            assert rank_progress.awaited(
                calls, 'create_communicator', dict.fromkeys(OTHERS, progress)) == awaited
    finally:
        flight_recorder.creations[calls.ranks] -= 1  # as none has been created


A, B, C = (('FlightRecord', ranks, 1) for ranks in [(0, 1), (1, 2), (0, 2)])


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
def test_deadlocks_in_the_shutdown_are_found(ranks, expected):
    assert rank_progress.deadlocked(ranks) == expected
