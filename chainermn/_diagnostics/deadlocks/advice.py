"""Advice about a deadlock, based on the operations in which the ranks wait."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from chainermn._diagnostics.deadlocks.rank_state import ThreadState, Wait, WaitKind
from chainermn._operations.ranks import ranks_text
from chainermn._operations.table import BACKWARD_OF_RECV, BACKWARD_OF_SEND, END, REQUEST

_MESSAGES = WaitKind.SEND, WaitKind.RECEIVE
_PAIRS = 'Each send needs a recv with the same tag on the other rank.'
_COLLECTIVES = 'All ranks must call the same collectives in the same order.'
_ORDER = ('Look for a call inside "if comm.rank == ...", for loops of different lengths, or for '
          'calls in a different order.')


class WaitingRank(NamedTuple):
    """A rank in a deadlock. Ranks are numbered as in COMM_WORLD.

    Attributes:
        rank: The rank.
        thread: The thread that waits.
        wait: The ranks or messages that the thread waits for.
        awaited: The rank that it waits for: the next rank in the cycle.
        has_ended: Whether the awaited rank has reached the end of the script.
        other_tags: The tags of messages from the awaited rank that this rank has not received.
    """

    rank: int
    thread: ThreadState
    wait: Wait
    awaited: int
    has_ended: bool
    other_tags: Sequence[int]


def advice(ranks: Sequence[WaitingRank]) -> str:
    """Return advice about a deadlock.

    Args:
        ranks: The ranks in the deadlock; each waits for the next one.
    """
    kinds = {each.wait.kind for each in ranks}
    for each in ranks:
        if each.other_tags:
            return (f'Rank {each.awaited} sends to rank {each.rank} with tag '
                    f'{min(each.other_tags)}, but rank {each.rank} receives with tag '
                    f'{each.wait.tag}. Pass the same tags, in the same order, on both ranks.')
    if any(each.thread.operation == REQUEST for each in ranks):
        return ('Ranks wait for an updater of a dist_async KVStore, and the updater itself is '
                'waiting. An updater must not communicate or wait for other ranks in any way.')
    backward = {each.rank: each for each in ranks
                if each.thread.operation in (BACKWARD_OF_SEND, BACKWARD_OF_RECV)}
    if len(backward) == len(ranks) and not ranks[-1].has_ended:
        return ('The ranks run backward for their messages in different orders. Connect the send '
                'and recv calls of each rank: pass the result of send to recv as '
                'delegate_variable, or to pseudo_connect, and call backward() on the last result.')
    for each in backward.values():
        if each.awaited not in backward:
            message = ('received from' if each.thread.operation == BACKWARD_OF_SEND else 'sent to')
            return (f'Rank {each.awaited} has not called backward() for the data that it {message} '
                    f'rank {each.rank}. Call backward() on both ranks, once per forward pass and '
                    'in the same order, or send an array (x.array) if no gradient is needed.')
    ended = {each.rank for each in ranks if each.thread.operation == END} | {
        each.awaited for each in ranks if each.has_ended}
    for each in ranks:
        if each.awaited in ended and each.rank not in ended:
            return (f'Rank {each.awaited} has finished without making the call that rank '
                    f'{each.rank} waits for. '
                    f'{_PAIRS if each.wait.kind in _MESSAGES else _COLLECTIVES} {_ORDER}')
    who = ranks_text(sorted(each.rank for each in ranks))
    if kinds == {WaitKind.RECEIVE}:
        return f'Each of {who} receives first. Let one of them send first.'
    if kinds == {WaitKind.SEND}:
        return (f'Each of {who} sends first, and a send waits for the recv of the other rank. Let '
                'one of them receive first, or use comm.isend.')
    if kinds <= {*_MESSAGES}:
        return f'{_PAIRS} {_ORDER}'
    if kinds == {WaitKind.CREATION}:
        return 'All ranks must create the same communicators in the same order.'
    if not kinds & {*_MESSAGES}:
        return f'{_COLLECTIVES} {_ORDER}'
    return f'{_COLLECTIVES} {_PAIRS} {_ORDER}'
