"""The wait-for graph: finds ranks that wait for each other, or for finished ranks, forever.

A collective waits for all ranks that have not entered it; a send for its receiver; a receive for
its sender, or if any rank may send, for one of them.  A rank is blocked if all of its threads are.
Ranks that are not blocked, or whose state is unknown because they run, can make progress, and so
can ranks that wait for them.  The ranks that remain are deadlocked (Hilbrich et al. 2012).
"""
from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from mpi4py import MPI

from chainermn._diagnostics.flight_recorder import (
    BackgroundRecord,
    CreationRecord,
    FlightRecord,
    Key,
    MessageRecord,
    ServiceRecord,
    creations,
)
from chainermn._diagnostics.rank_progress import Progress
from chainermn._ranks import ranks_text

#: Operations that block for one message.
_BLOCKING = frozenset((
    'send', 'send_obj', 'recv', 'recv_obj', 'wait', 'waitall', 'send_activation',
    'recv_activation', 'send_gradient', 'recv_gradient'))


class Kind(enum.Enum):
    """Which ranks an operation waits for."""

    COLLECTIVE = enum.auto()  # those that have not entered it
    UNCHECKED = enum.auto()  # perhaps those that have not entered it; certainly if they finished
    CREATION = enum.auto()  # those that have not called create_communicator
    SEND = enum.auto()  # the receiver
    RECEIVE = enum.auto()  # the sender, or one of all ranks


class Wait(NamedTuple):
    """What an operation waits for.  Ranks are those of its communicator."""

    kind: Kind
    key: Key
    number: int = 0  # of the collective or creation
    peer: int = 0
    tag: int = 0

    @classmethod
    def of(cls, calls: FlightRecord, operation: str) -> Wait | None:
        """Returns what the current operation of a communicator waits for, if it is known.

        Args:
            calls: A flight record of the communicator.
            operation: The name of the operation.
        """
        if isinstance(calls, ServiceRecord):
            return None  # the other ranks answer, whatever they do
        if isinstance(calls, CreationRecord):
            return cls(Kind.CREATION, calls.key, creations[calls.ranks])
        if isinstance(calls, BackgroundRecord) or not (
                operation in _BLOCKING or isinstance(calls, MessageRecord)):
            kind = Kind.COLLECTIVE if calls.waits_for_all else Kind.UNCHECKED
            return cls(kind, calls.key, calls.entered)
        message = calls.newest_record
        if not isinstance(calls, MessageRecord) or not isinstance(message, tuple) or (
                operation not in _BLOCKING
                or message[0] != ('wait' if operation == 'waitall' else operation)):
            return None
        name, peer, tag, _ = message
        if 'send' not in name:
            return cls(Kind.RECEIVE, calls.key, 0, peer, tag)
        is_sent = calls.sent_at == calls.count  # it may still be pickling
        return cls(Kind.SEND, calls.key, 0, peer, tag) if is_sent else None


class ThreadWait(NamedTuple):
    """What a thread waits for: it is blocked if one of its nested operations is."""

    text: str
    waits: tuple[Wait, ...]


class RankState(NamedTuple):
    """The state of a rank none of whose threads can make progress by itself."""

    progress: Progress
    threads: tuple[ThreadWait, ...]
    is_finished: bool  # whether it is at the end of the program
    has_agreed: bool  # whether it enters no more operations


class WaitGraph:
    """The wait-for graph of some ranks.

    Args:
        states: The states of ranks that may be blocked, by rank in COMM_WORLD.
    """

    def __init__(self, states: Mapping[int, RankState]) -> None:
        self._states = states
        self._behind: dict[Wait, set[int]] = {}

    def deadlocked(self) -> set[int]:
        """Returns the ranks that wait forever, without those that are done."""
        ended = {rank for rank, state in self._states.items() if state.has_agreed}
        waiting = set(self._states) - ended
        while True:
            still = {rank for rank in waiting if self._is_blocked(rank, waiting | ended)}
            if still == waiting:
                return waiting
            waiting = still

    def _is_blocked(self, rank: int, waiting: set[int]) -> bool:
        threads = self._states[rank].threads
        return bool(threads) and all(
            any(self.awaited(wait, rank, waiting) for wait in thread.waits) for thread in threads)

    def awaited(self, wait: Wait, rank: int, waiting: set[int]) -> set[int]:
        """Returns the ranks that block an operation.

        Args:
            wait: What it waits for.
            rank: The rank that is in the operation.
            waiting: The ranks that make no progress.
        """
        if wait.kind is Kind.SEND:
            receiver = wait.key[1][wait.peer]
            return {receiver} & waiting if self._is_unreceived(wait, rank, receiver) else set()
        if wait.kind is Kind.RECEIVE:
            return self._senders(wait, rank, waiting)
        if wait not in self._behind:
            self._behind[wait] = {
                other for other in wait.key[1] if other in self._states
                and self._entered(wait, other) < wait.number
                and (wait.kind is not Kind.UNCHECKED or self._states[other].is_finished)}
        return self._behind[wait] & waiting

    def _entered(self, wait: Wait, rank: int) -> float:
        progress = self._states[rank].progress
        if wait.kind is Kind.CREATION:
            return progress.creations.get(wait.key[1], 0)
        return progress.entered.get(wait.key, math.inf)  # infinite for a freed communicator

    def _is_unreceived(self, wait: Wait, rank: int, receiver: int) -> bool:
        if receiver not in self._states:
            return False
        me = wait.key[1].index(rank)
        sent = self._states[rank].progress.sent.get(wait.key)
        received = self._states[receiver].progress.received.get(wait.key)
        return _count(received, me, wait.tag) < _count(sent, wait.peer, wait.tag)

    def _senders(self, wait: Wait, rank: int, waiting: set[int]) -> set[int]:
        """Returns the ranks of which one has to send; empty if one may, or has done so."""
        ranks = wait.key[1]
        me = ranks.index(rank)
        received = self._states[rank].progress.received.get(wait.key)
        peers = range(len(ranks)) if wait.peer < 0 else (wait.peer,)
        for peer in peers:
            sender = ranks[peer]
            if sender != rank and sender not in waiting:
                return set()
            sent = self._states[sender].progress.sent.get(wait.key)
            if _count(sent, me, wait.tag) > _count(received, peer, wait.tag):
                return set()  # a message is in flight
        return {ranks[peer] for peer in peers} - {rank}

    def cycle(self, deadlocked: Collection[int]) -> str:
        """Describes ranks that wait for each other, or for finished ranks."""
        waiting = {*deadlocked, *(
            rank for rank, state in self._states.items() if state.has_agreed)}
        rank, path, edges = min(deadlocked), [], {}
        while rank in deadlocked and rank not in edges:
            path.append(rank)
            text, awaited = self._edge(rank, waiting)
            edges[rank] = f'rank {rank} waits {text} for {ranks_text(sorted(awaited))}'
            rank = min(awaited - set(edges), default=min(awaited))
        if rank in edges:
            path = path[path.index(rank):]
        else:
            edges[path[-1]] += f'; rank {rank} has reached the end of the program'
        return '; '.join(edges[each] for each in path)

    def _edge(self, rank: int, waiting: set[int]) -> tuple[str, set[int]]:
        """Returns in what a rank waits, and for which ranks."""
        return next((thread.text, awaited) for thread in self._states[rank].threads
                    for wait in thread.waits if (awaited := self.awaited(wait, rank, waiting)))


def _count(counts: Mapping[tuple[int, int], int] | None, peer: int, tag: int) -> float:
    """Counts messages of a peer with a tag, or any tag; infinite for a freed communicator."""
    if counts is None:
        return math.inf
    return sum(n for (other, theirs), n in counts.items()
               if other == peer and tag in (theirs, MPI.ANY_TAG))
