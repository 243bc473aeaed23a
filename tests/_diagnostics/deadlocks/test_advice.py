"""The second line of the report of a deadlock says what to do."""

import pytest

from chainermn._diagnostics.deadlocks.rank_state import (
    Progress,
    RankState,
    ThreadState,
    Wait,
    WaitKind,
)
from chainermn._diagnostics.deadlocks.wait_graph import WaitGraph
from chainermn._operations.table import (
    BACKWARD_OF_RECV,
    BACKWARD_OF_SEND,
    END,
    RECV,
    REQUEST,
    SEND,
)

RANKS = 0, 1, 2
CALLS, OTHER = ('FlightRecord', RANKS, 1), ('FlightRecord', RANKS, 2)
MESSAGES = ('MessageRecord', RANKS, 1)


def state(operation, wait=None, entered=None, sent=None, received=None, has_ended=False):
    progress = Progress(entered or {}, {}, {MESSAGES: sent or {}}, {MESSAGES: received or {}},
                        {MESSAGES: {}})
    thread = ThreadState(operation, operation, '', 'a.py:1', '', (wait,) if wait else ())
    return RankState(progress, (thread,), has_ended, has_ended)


def receiving(peer, tag=0, operation=RECV, **counts):
    return state(operation, Wait(WaitKind.RECEIVE, MESSAGES, 0, peer, tag), **counts)


def sending(peer, tag=0, operation=SEND, **counts):
    return state(operation, Wait(WaitKind.SEND, MESSAGES, 0, peer, tag), sent={(peer, tag): 1},
                 **counts)


def collective(operation, key=CALLS):
    entered = {CALLS: 4, OTHER: 4, key: 5}
    return state(operation, Wait(WaitKind.COLLECTIVE, key, 5), entered=entered)


creating = RankState(Progress({CALLS: 4}, {RANKS: 2}, {}, {}, {}), (ThreadState(
    'create_communicator', '', '', 'a.py:1', '', (
        Wait(WaitKind.CREATION, ('CreationRecord', RANKS, 1), 2),)),), False, False)


ENDED = state(END, has_ended=True)
NO_BACKWARD = 'Rank 1 has not called backward() for the data that it {} rank 0. Call backward()'


@pytest.mark.parametrize(('states', 'expected'), [
    ([sending(1, tag=1), receiving(0, tag=2)],
     'Rank 0 sends to rank 1 with tag 1, but rank 1 receives with tag 2. Pass the same tags, in '
     'the same order, on both ranks.'),
    # An object with another tag, sent by a rank that continues.
    ([state('barrier', Wait(WaitKind.COLLECTIVE, CALLS, 5), {CALLS: 5}, sent={(1, 7): 1}),
      receiving(0, tag=2, entered={CALLS: 4})],
     'Rank 0 sends to rank 1 with tag 7, but rank 1 receives with tag 2.'),
    ([receiving(1, operation=BACKWARD_OF_SEND), receiving(0)],
     NO_BACKWARD.format('received from')),
    ([receiving(1, operation=BACKWARD_OF_SEND), ENDED], NO_BACKWARD.format('received from')),
    ([sending(1, operation=BACKWARD_OF_RECV), sending(0)], NO_BACKWARD.format('sent to')),
    ([receiving(1, operation=BACKWARD_OF_SEND), receiving(0, operation=BACKWARD_OF_SEND)],
     'The ranks run backward for their messages in different orders. Connect the send'),
    ([receiving(1), receiving(0)],
     'Each of ranks 0-1 receives first. Let one of them send first.'),
    ([sending(1), sending(0)],
     'Each of ranks 0-1 sends first, and a send waits for the recv of the other rank. Let one of '
     'them receive first, or use comm.isend.'),
    ([sending(1), receiving(2), sending(0)],
     'Each send needs a recv with the same tag on the other rank. Look for a call inside'),
    ([receiving(1), ENDED],
     'Rank 1 has finished without making the call that rank 0 waits for. Each send needs a'),
    ([receiving(1, entered={CALLS: 4}), collective(END)],
     'Rank 1 has finished without making the call that rank 0 waits for. Each send needs a'),
    ([collective('bcast'), collective('gather', OTHER)],
     'All ranks must call the same collectives in the same order. Look for a call inside "if comm'),
    ([collective('bcast'), state(RECV, Wait(WaitKind.RECEIVE, MESSAGES, 0, 0, 0), {CALLS: 4})],
     'All ranks must call the same collectives in the same order. Each send needs a recv'),
    ([receiving(1, operation=REQUEST), receiving(0, operation=REQUEST)],
     'Ranks wait for an updater of a dist_async KVStore, and the updater itself is waiting. An '),
    ([creating, collective('bcast')],
     'All ranks must call the same collectives in the same order. Look for'),
])
def test_advice(states, expected):
    graph = WaitGraph(dict(enumerate(states)))
    deadlocked = graph.deadlocked()
    assert deadlocked
    _, advice = graph.cycle(deadlocked).splitlines()
    assert advice.startswith(expected)
