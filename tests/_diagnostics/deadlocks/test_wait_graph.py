"""Ranks that wait for each other forever are found; those that may make progress are not."""

import numpy as np
import pytest
from mpi4py import MPI

from chainermn._diagnostics.deadlocks.rank_state import (
    Progress,
    RankState,
    ThreadState,
    Wait,
    WaitKind,
)
from chainermn._diagnostics.deadlocks.wait_graph import WaitGraph
from chainermn._operations.call import Call

SIZE = MPI.COMM_WORLD.size
WORLD = ('FlightRecord', (0, 1, 2), 1)
OTHER = ('FlightRecord', (0, 1, 2), 2)
MESSAGES = ('MessageRecord', (0, 1, 2), 1)
needs_others = pytest.mark.skipif(SIZE < 2, reason='needs another rank')


def state(*waits, entered=None, sent=None, received=None, receiving=None, created=0,
          is_finished=False, may_exit=False, service=None):
    """The state of a rank with one thread for each list of waits; the last may answer."""
    progress = Progress(entered or {}, {(0, 1, 2): created}, {MESSAGES: sent or {}},
                        {MESSAGES: received or {}}, {MESSAGES: receiving or {}})
    threads = tuple(ThreadState(each[0].kind.name.lower() if each else '', '', '', 'a.py:1', '',
                                each, service if number == len(waits) else None)
                    for number, each in enumerate(waits, 1))
    return RankState(progress, threads, is_finished, may_exit)


def done(**counts):
    """The state of a rank that enters no more operations."""
    return state((), is_finished=True, may_exit=True, **counts)


def in_collective(number, key=WORLD, **entered):
    return state((Wait(WaitKind.COLLECTIVE, key, number),), entered={
        WORLD: entered.get('world', 0), OTHER: entered.get('other', 0), key: number})


def receiving(peer, tag=0, **counts):
    return state((Wait(WaitKind.RECEIVE, MESSAGES, 0, peer, tag),), **counts)


def sending(peer, tag=0, sent=1, **counts):
    return state((Wait(WaitKind.SEND, MESSAGES, 0, peer, tag),), sent={(peer, tag): sent}, **counts)


SERVICE = ('ServiceRecord', (0, 1, 2), 1)
RECEIVE = Wait(WaitKind.RECEIVE, MESSAGES, 0, 0, 0)


def asking(*ranks):
    return state((Wait(WaitKind.ASK, SERVICE, asked=ranks),))


creating = state((Wait(WaitKind.CREATION, ('CreationRecord', (0, 1, 2), 1), 2),), created=2,
                 entered={WORLD: 4})
no_wait = state(())


@pytest.mark.parametrize(('states', 'expected'), [
    # Collectives of two communicators in opposite orders; rank 2 has entered both or runs.
    ([in_collective(5, WORLD), in_collective(3, OTHER)], {0, 1}),
    ([in_collective(5, WORLD, other=3), in_collective(3, OTHER)], set()),
    ([in_collective(5, WORLD), in_collective(3, OTHER, world=5)], set()),
    # Rank 2 waits for rank 1, which waits for rank 0, which runs.
    ([None, in_collective(5, WORLD), receiving(1)], set()),
    # All have entered it: one of them may be unpickling.
    ([in_collective(5)] * 3, set()),
    ([in_collective(5, WORLD), done(entered={WORLD: 4})], {0}),
    ([in_collective(5, WORLD), done(entered={WORLD: 5})], set()),
    # A communicator that rank 1 has freed.
    ([in_collective(5), state((Wait(WaitKind.COLLECTIVE, OTHER, 3),), entered={OTHER: 3})], set()),
    ([creating, in_collective(5, WORLD)], {0, 1}),
    ([creating, creating], set()),
    # Messages; those of one thread without tags are in test_many_ranks.py.
    ([receiving(1, 7), sending(0, 8)], {0, 1}),
    ([receiving(1, -1), sending(0, 8)], set()),
    ([receiving(1, received={(1, 0): 1}), receiving(0, sent={(0, 0): 1})], {0, 1}),
    ([receiving(1, received={(1, 0): 1}), receiving(0, sent={(0, 0): 2})], set()),
    ([sending(1), receiving(0, received={(0, 0): 1}), receiving(0)], set()),
    # Its large message is being received by an irecv.
    ([sending(1), receiving(0, 1, receiving={(0, 0): 1})], set()),
    ([sending(1, sent=2), receiving(0, 1, receiving={(0, 0): 1})], {0, 1}),
    ([sending(1, receiving={(1, 0): 1}), sending(0, receiving={(0, 0): 1})], set()),
    # Of any rank: one of them has to send.
    ([receiving(-1, -1), receiving(0), receiving(0, sent={(0, 9): 1})], set()),
    ([receiving(-1, -1, sent={(0, 0): 1}), receiving(0), receiving(0)], set()),  # to itself
    # A service: its thread on rank 1 is blocked, or it answers.
    ([asking(1), state((RECEIVE,), (RECEIVE,), service=SERVICE)], {0, 1}),
    ([asking(1), state((RECEIVE,))], set()),
    ([asking(1, 2), state((RECEIVE,), service=SERVICE), state((RECEIVE,))], set()),
    ([asking(1, 2), state((RECEIVE,), service=SERVICE), None], set()),
    ([asking(), receiving(0)], set()),
    # Finished ranks.
    ([receiving(1), done()], {0}),
    ([receiving(1), done(sent={(0, 0): 1})], set()),
    ([receiving(-1), done(), done()], {0}),
    ([receiving(-1), done(), None], set()),
    ([in_collective(5), done(entered={WORLD: 4}), None], {0}),
    ([done(), done(), done()], set()),
    # Only some threads are blocked, or one of nested operations.
    ([state((Wait(WaitKind.RECEIVE, MESSAGES, 0, 1, 0),), ()), receiving(0)], set()),
    ([state((Wait(WaitKind.COLLECTIVE, WORLD, 0), Wait(WaitKind.RECEIVE, MESSAGES, 0, 1, 0))),
      receiving(0)], {0, 1}),
    ([no_wait, receiving(0)], set()),
    ([state(), receiving(0)], set()),
])
def test_deadlocks(states, expected):
    graph = WaitGraph({rank: each for rank, each in enumerate(states) if each is not None})
    assert graph.deadlocked() == expected


@pytest.mark.parametrize(('states', 'expected'), [
    ([receiving(1), receiving(0)],
     'rank 0 waits in receive (a.py:1) for rank 1; rank 1 waits in receive (a.py:1) for rank 0'),
    # Rank 0 waits for the cycle, and is no part of it.
    ([receiving(1), receiving(2), receiving(1)],
     'rank 1 waits in receive (a.py:1) for rank 2; rank 2 waits in receive (a.py:1) for rank 1'),
    ([receiving(-1), receiving(0), done()],
     'rank 0 waits in receive (a.py:1) for ranks 1-2; rank 1 waits in receive (a.py:1) for rank 0'),
    ([receiving(1), receiving(2), done()],
     'rank 0 waits in receive (a.py:1) for rank 1; rank 1 waits in receive (a.py:1) for rank 2; '
     'rank 2 has reached the end of the script'),
])
def test_a_cycle_is_described(states, expected):
    graph = WaitGraph(dict(enumerate(states)))
    cycle, _ = graph.cycle(graph.deadlocked()).splitlines()  # test_advice.py has the second line
    assert cycle == expected


def call_of(operation):
    call = Call()
    call.operation = operation
    return call


def test_a_collective_is_waited_for_by_its_number(naive):
    naive.barrier()
    calls, messages = naive._flight_records()
    assert calls.count == calls.entered
    assert Wait.of(calls, call_of('barrier')) == Wait(WaitKind.COLLECTIVE, calls.key, calls.count)
    assert Wait.of(messages, call_of('barrier')) is None  # no message


@needs_others
def test_a_message_is_waited_for_by_its_call(naive):
    calls, messages = naive._flight_records()

    recorded = messages.add_message

    send = recorded('send', 1, 5)
    assert Wait.of(messages, send) is None  # it may still be pickling
    messages.count_sent(1, 5)
    recv = recorded('recv', 1, 8)  # of another thread
    assert Wait.of(messages, send) == Wait(WaitKind.SEND, messages.key, 0, 1, 5)
    assert Wait.of(messages, recv) == Wait(WaitKind.RECEIVE, messages.key, 0, 1, 8)
    assert Wait.of(messages, call_of('recv')) is None  # it is not recorded yet
    assert Wait.of(calls, send) is None
    assert Wait.of(messages, recorded('wait', -2, -1)) == Wait(
        WaitKind.RECEIVE, messages.key, 0, -2, -1)
    assert Wait.of(messages, call_of('waitall')) is None  # which calls wait
    messages.sent.clear()
    naive.barrier()


@needs_others
def test_messages_are_counted_before_they_leave_and_after_they_are_received(naive):
    naive.isend(np.zeros(1), (naive.rank + 1) % SIZE, 3)
    before = (naive.rank - 1) % SIZE
    naive.recv(before, 3)
    key, progress = naive._flight_records()[1].key, Progress.of_this_rank()
    assert progress.sent[key] == {((naive.rank + 1) % SIZE, 3): 1}
    assert progress.received[key] == {(before, 3): 1}
    naive.barrier()
