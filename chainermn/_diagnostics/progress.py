"""How far each rank has come, which tells whether somebody waits in vain for one that has ended.

A rank that ends tells the others how many operations of each communicator it has entered, and how
many messages it has sent and received.  Who is in an operation that the ended rank has entered too
does not wait for it: it may be unpickling, adding, or taking a large array.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from mpi4py import MPI

from chainermn._diagnostics import flight_recorder
from chainermn._diagnostics.flight_recorder import Calls, Key, MessageCalls, ServiceCalls

#: Operations that block for one message; the last call that is kept says which.
_BLOCKING = {'send': 'send', 'send_obj': 'send_obj', 'recv': 'recv', 'recv_obj': 'recv_obj',
             'wait': 'wait', 'waitall': 'wait',
             **{each: each for each in (
                 'send_activation', 'recv_activation', 'send_gradient', 'recv_gradient')}}

#: The communicator in whose last exchange this rank is, at the end of the program.
ending: Calls | None = None
#: Whether this rank is through with those exchanges, or takes part in no more of them.
has_agreed = False

_Counts = dict[tuple[int, int], int]  # of messages, by the other rank and the tag


class Progress(NamedTuple):
    """What a rank has entered, sent and received when it ends."""

    entered: dict[Key, int]
    creations: dict[tuple[int, ...], int]  # of communicators, by ranks
    sent: dict[Key, _Counts]
    received: dict[Key, _Counts]
    ending: Key | None  # the communicator in whose last exchange it is
    has_agreed: bool  # whether it enters no more of them

    @classmethod
    def own(cls) -> Progress:
        """The progress of this rank."""
        everything = flight_recorder.everything()
        messages = [calls for calls in everything if isinstance(calls, MessageCalls)]
        return cls({calls.key: calls.entered for calls in everything},
                   dict(flight_recorder.creations),
                   {calls.key: dict(calls.sent) for calls in messages},
                   {calls.key: dict(calls.received) for calls in messages},
                   ending.key if ending is not None else None, has_agreed)


def awaited(calls: Calls, operation: str, ended: Mapping[int, Progress]) -> set[int]:
    """Returns the ended ranks without which an operation cannot complete.

    Args:
        calls: Of the communicator.
        operation: That this rank is in.
        ended: The progress of the ranks that have ended, by their number in COMM_WORLD.
    """
    if isinstance(calls, ServiceCalls):
        return set()  # a rank goes on answering while others may ask
    if operation in _BLOCKING or isinstance(calls, MessageCalls):
        return _awaited_by_message(calls, operation, ended)
    return {rank for rank in calls.ranks if rank in ended
            and ended[rank].entered.get(calls.key, math.inf) < calls.entered}


def awaited_creation(ranks: tuple[int, ...], ended: Mapping[int, Progress]) -> set[int]:
    """Returns the ended ranks without which create_communicator cannot complete."""
    return {rank for rank in ranks if rank in ended
            and ended[rank].creations.get(ranks, 0) < flight_recorder.creations[ranks]}


def _awaited_by_message(calls: Calls, operation: str, ended: Mapping[int, Progress]) -> set[int]:
    kept = calls.newest_kept
    if not isinstance(calls, MessageCalls) or not isinstance(kept, tuple) or (
            kept[0] != _BLOCKING.get(operation)):
        return set()
    _, peer, tag, _ = kept
    me = calls.ranks.index(MPI.COMM_WORLD.rank)
    if 'send' in operation:
        rank = calls.ranks[peer]
        waits = rank in ended and _count(
            ended[rank].received.get(calls.key), me, tag) < _count(calls.sent, peer, tag)
        return {rank} if waits else set()
    peers = [peer] if peer >= 0 else [*range(len(calls.ranks))]
    for peer in peers:
        rank = calls.ranks[peer]
        if peer != me and rank not in ended:
            return set()
        sent = calls.sent if peer == me else ended[rank].sent.get(calls.key)
        if _count(sent, me, tag) > _count(calls.received, peer, tag):
            return set()  # it has sent a message that is still to be received
    return {calls.ranks[peer] for peer in peers if peer != me}


def _count(counts: Mapping[tuple[int, int], int] | None, peer: int, tag: int) -> float:
    """Messages to or from a rank with a tag, or with any; of a freed communicator, any number."""
    if counts is None:
        return math.inf
    return sum(n for (other, theirs), n in list(counts.items())
               if other == peer and tag in (theirs, MPI.ANY_TAG))


def deadlocked(ended: Mapping[int, Progress]) -> set[int]:
    """Returns the ended ranks that wait in vain for others that have ended, too."""
    through = {rank for rank, progress in ended.items() if progress.has_agreed}
    found = {rank for rank, progress in ended.items() if progress.ending is not None}
    while True:
        still = {rank for rank in found
                 if _awaited_at_the_end(ended[rank], ended) & (found | through)}
        if still == found:
            return found
        found = still


def _awaited_at_the_end(own: Progress, ended: Mapping[int, Progress]) -> set[int]:
    key = own.ending
    assert key is not None
    return {rank for rank in key[1] if rank in ended
            and ended[rank].entered.get(key, math.inf) < own.entered.get(key, 0)}


