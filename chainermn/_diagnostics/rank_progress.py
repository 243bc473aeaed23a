"""The progress of ranks that have finished, to detect ranks that wait for them in vain.

A rank that finishes notifies the others how many operations of each communicator it has entered,
and how many messages it has sent and received.  A rank in an operation that the finished rank has
entered too does not wait for it: it may be unpickling, adding, or receiving a large array.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from mpi4py import MPI

from chainermn._diagnostics import flight_recorder
from chainermn._diagnostics.flight_recorder import (
    BackgroundRecord,
    CreationRecord,
    FlightRecord,
    Key,
    MessageRecord,
    ServiceRecord,
    creations,
)

#: Operations that block for one message, with the operation of the newest record then.
_BLOCKING = {'send': 'send', 'send_obj': 'send_obj', 'recv': 'recv', 'recv_obj': 'recv_obj',
             'wait': 'wait', 'waitall': 'wait',
             **{each: each for each in (
                 'send_activation', 'recv_activation', 'send_gradient', 'recv_gradient')}}

#: The communicator whose shutdown exchange this rank is in.
ending: FlightRecord | None = None
#: Whether this rank enters no more shutdown exchanges.
has_agreed = False

_Counts: TypeAlias = dict[tuple[int, int], int]  # messages by peer and tag


class Progress(NamedTuple):
    """The operations that a finished rank has entered, and its messages."""

    entered: dict[Key, int]
    creations: dict[tuple[int, ...], int]  # of communicators, by ranks
    sent: dict[Key, _Counts]
    received: dict[Key, _Counts]
    ending: Key | None  # the communicator whose shutdown exchange it is in
    has_agreed: bool  # whether it enters no more shutdown exchanges

    @classmethod
    def own(cls) -> Progress:
        """The progress of this rank."""
        everything = flight_recorder.everything()
        messages = [calls for calls in everything if isinstance(calls, MessageRecord)]
        return cls({calls.key: calls.entered for calls in everything},
                   dict(creations),
                   {calls.key: dict(calls.sent) for calls in messages},
                   {calls.key: dict(calls.received) for calls in messages},
                   ending.key if ending is not None else None, has_agreed)


def awaited(calls: FlightRecord, operation: str, finished: Mapping[int, Progress]) -> set[int]:
    """Returns the finished ranks without which an operation cannot complete.

    Args:
        calls: The flight record of its communicator.
        operation: The current operation of this rank.
        finished: The progress of finished ranks, by rank in COMM_WORLD.
    """
    if isinstance(calls, ServiceRecord):
        return set()  # finished ranks still answer
    if isinstance(calls, CreationRecord):
        return {rank for rank in calls.ranks if rank in finished and
                finished[rank].creations.get(calls.ranks, 0) < creations[calls.ranks]}
    if not isinstance(calls, BackgroundRecord) and (
            operation in _BLOCKING or isinstance(calls, MessageRecord)):
        return _awaited_by_message(calls, operation, finished)
    return {rank for rank in calls.ranks if rank in finished
            and finished[rank].entered.get(calls.key, math.inf) < calls.entered}


def _awaited_by_message(calls: FlightRecord, operation: str, finished: Mapping[int, Progress]
                        ) -> set[int]:
    message = calls.newest_record
    if not isinstance(calls, MessageRecord) or not isinstance(message, tuple) or (
            message[0] != _BLOCKING.get(operation)):
        return set()
    _, peer, tag, _ = message
    me = calls.ranks.index(MPI.COMM_WORLD.rank)
    if 'send' in operation:
        rank = calls.ranks[peer]
        waits = rank in finished and _count(
            finished[rank].received.get(calls.key), me, tag) < _count(calls.sent, peer, tag)
        return {rank} if waits else set()
    peers = [peer] if peer >= 0 else [*range(len(calls.ranks))]
    for peer in peers:
        rank = calls.ranks[peer]
        if peer != me and rank not in finished:
            return set()
        sent = calls.sent if peer == me else finished[rank].sent.get(calls.key)
        if _count(sent, me, tag) > _count(calls.received, peer, tag):
            return set()  # a message is in flight
    return {calls.ranks[peer] for peer in peers if peer != me}


def _count(counts: Mapping[tuple[int, int], int] | None, peer: int, tag: int) -> float:
    """Counts messages of a peer with a tag, or any tag; infinite for a freed communicator."""
    if counts is None:
        return math.inf
    return sum(n for (other, theirs), n in list(counts.items())
               if other == peer and tag in (theirs, MPI.ANY_TAG))


def deadlocked(finished: Mapping[int, Progress]) -> set[int]:
    """Returns the finished ranks that wait in vain for other finished ranks."""
    agreed = {rank for rank, progress in finished.items() if progress.has_agreed}
    waiting = {rank for rank, progress in finished.items() if progress.ending is not None}
    while True:
        still = {rank for rank in waiting
                 if _awaited_in_shutdown(finished[rank], finished) & (waiting | agreed)}
        if still == waiting:
            return waiting
        waiting = still


def _awaited_in_shutdown(own: Progress, finished: Mapping[int, Progress]) -> set[int]:
    key = own.ending
    assert key is not None
    return {rank for rank in key[1] if rank in finished
            and finished[rank].entered.get(key, math.inf) < own.entered.get(key, 0)}
