"""The wait-for graph: finds ranks that wait for each other, or for finished ranks, forever.

A collective waits for all ranks that have not entered it; a send for its receiver; a receive for
its sender, or if any rank may send, for one of them.  A rank is blocked if all of its threads are.
Ranks that are not blocked, or whose state is unknown because they run, can make progress, and so
can ranks that wait for them.  The ranks that remain are deadlocked (Hilbrich et al. 2012).
"""
from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from mpi4py import MPI

from chainermn._diagnostics.deadlocks.rank_progress import Counts, Progress
from chainermn._diagnostics.flight_recorder import (
    BackgroundRecord,
    CreationRecord,
    FlightRecord,
    Key,
    MessageRecord,
    ServiceRecord,
    creations,
)
from chainermn._failures.ranks import ranks_text
from chainermn._operations import Waits, waiting_for

#: Operations that block for messages.
_BLOCKING = waiting_for(Waits.RECEIVER, Waits.SENDER, Waits.MESSAGES)
#: The number of ranks of a cycle that are described.
_SHOWN = 16


class Kind(enum.Enum):
    """Which ranks an operation waits for."""

    COLLECTIVE = enum.auto()  # ranks that have not entered it
    UNCHECKED = enum.auto()  # the same, but only finished ranks are certain
    CREATION = enum.auto()  # ranks that have not called create_communicator
    SEND = enum.auto()  # the receiver
    RECEIVE = enum.auto()  # the sender, or one of all ranks
    ASK = enum.auto()  # ranks whose service has not answered


class Wait(NamedTuple):
    """What an operation waits for.  Ranks are those of its communicator."""

    kind: Kind
    key: Key
    number: int = 0  # of the collective or creation
    peer: int = 0
    tag: int = 0
    asked: tuple[int, ...] = ()  # in COMM_WORLD

    @classmethod
    def of(cls, calls: FlightRecord, operation: str, thread: int = 0) -> Wait | None:
        """Return what the current operation of a communicator waits for, if it is known.

        Args:
            calls: A flight record of the communicator.
            operation: The name of the operation.
            thread: The identifier of its thread.
        """
        if isinstance(calls, ServiceRecord):
            return cls(Kind.ASK, calls.key, asked=calls.asked.get(thread, ()))
        if isinstance(calls, CreationRecord):
            return cls(Kind.CREATION, calls.key, creations()[calls.ranks])
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
    service: Key | None = None  # for which it answers


class RankState(NamedTuple):
    """The state of a rank none of whose threads can make progress by itself."""

    progress: Progress
    threads: tuple[ThreadWait, ...]
    is_finished: bool  # whether it is at the end of the program
    may_exit: bool  # whether it enters no more operations


class WaitGraph:
    """The wait-for graph of some ranks.

    Args:
        states: The states of ranks that may be blocked, by rank in COMM_WORLD.
    """

    def __init__(self, states: Mapping[int, RankState]) -> None:
        self._states = states
        self._behind: dict[Wait, set[int]] = {}
        self._sent: dict[Key, dict[int, Counts | None]] = {}  # by rank
        #: By rank and thread: what blocks each of its operations.
        self._blockers = {rank: [[self._find(wait, rank) for wait in thread.waits]
                                 for thread in state.threads] for rank, state in states.items()}

    def deadlocked(self) -> set[int]:
        """Return the ranks that wait forever, without those that are done."""
        ended = {rank for rank, state in self._states.items() if state.may_exit}
        waiting, n, forward = set(self._states), -1, True
        while n != len(waiting):
            n, forward = len(waiting), not forward  # of a chain, one direction removes all
            for rank in sorted(waiting - ended, reverse=forward):
                if not self._is_blocked(rank, waiting):
                    waiting.remove(rank)
        return waiting - ended

    def _is_blocked(self, rank: int, waiting: set[int]) -> bool:
        threads = self._blockers[rank]
        return bool(threads) and all(
            any(blockers.remain(waiting) for blockers in thread) for thread in threads)

    def awaited(self, rank: int, waiting: set[int]) -> Iterator[tuple[str, set[int]]]:
        """Yield the blocking operations of a rank, and the ranks that each waits for.

        Args:
            rank: The rank.
            waiting: The ranks that make no progress.
        """
        for thread, found in zip(self._states[rank].threads, self._blockers[rank], strict=True):
            for blockers in found:
                if blockers.remain(waiting):
                    yield thread.text, blockers.ranks & waiting

    def _find(self, wait: Wait, rank: int) -> _Blockers:
        """Return the ranks that block an operation of a rank, if they make no progress."""
        ranks = wait.key[1]
        if wait.kind is Kind.SEND:
            receiver = ranks[wait.peer]
            return _Blockers({receiver} if self._is_unreceived(wait, rank, receiver) else set())
        if wait.kind is Kind.RECEIVE:
            peers = range(len(ranks)) if wait.peer < 0 else (wait.peer,)
            if self._may_come(wait, rank, peers):
                return _Blockers(set())
            return _Blockers({ranks[peer] for peer in peers} - {rank}, needs_all=True)
        if wait.kind is Kind.ASK:
            are_blocked = all(any(
                thread.service == wait.key for thread in self._states[other].threads)
                for other in wait.asked if other in self._states)
            return _Blockers(set(wait.asked) if are_blocked else set(), needs_all=True)
        if wait not in self._behind:
            self._behind[wait] = {
                other for other in ranks if other in self._states
                and self._entered(wait, other) < wait.number
                and (wait.kind is not Kind.UNCHECKED or self._states[other].is_finished)}
        return _Blockers(self._behind[wait])

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
        theirs = self._states[receiver].progress
        return _count(theirs.received.get(wait.key), me, wait.tag) + _count(
            theirs.receiving.get(wait.key, {}), me, wait.tag) < _count(sent, wait.peer, wait.tag)

    def _may_come(self, wait: Wait, rank: int, peers: Iterable[int]) -> bool:
        """Return whether a message may arrive: it is in flight, or a sender is not known."""
        ranks = wait.key[1]
        me = ranks.index(rank)
        received = self._states[rank].progress.received.get(wait.key)
        if wait.key not in self._sent:
            self._sent[wait.key] = {each: state.progress.sent.get(wait.key)
                                    for each, state in self._states.items()}
        sent = self._sent[wait.key]
        return any(ranks[peer] not in sent or _count(sent[ranks[peer]], me, wait.tag) > _count(
            received, peer, wait.tag) for peer in peers)

    def cycle(self, deadlocked: Collection[int]) -> str:
        """Describe ranks that wait for each other, or for finished ranks."""
        waiting = {*deadlocked, *(
            rank for rank, state in self._states.items() if state.may_exit)}
        rank, path, edges = min(deadlocked), [], {}
        while rank in deadlocked and rank not in edges:
            path.append(rank)
            text, awaited = next(self.awaited(rank, waiting))
            edges[rank] = f'rank {rank} waits {text} for {ranks_text(sorted(awaited))}'
            rank = min(awaited - set(edges), default=min(awaited))
        if rank in edges:
            path = path[path.index(rank):]
        else:
            edges[path[-1]] += f'; rank {rank} has reached the end of the program'
        if len(path) > _SHOWN:
            edges[path[_SHOWN - 1]] += f'; and so on, {len(path)} ranks'
        return '; '.join(edges[each] for each in path[:_SHOWN])


class _Blockers(NamedTuple):
    """The ranks that block an operation while one of them, or all of them, make no progress."""

    ranks: set[int]
    needs_all: bool = False

    def remain(self, waiting: set[int]) -> bool:
        if self.needs_all:
            return bool(self.ranks) and self.ranks <= waiting
        return not self.ranks.isdisjoint(waiting)


def _count(counts: Mapping[tuple[int, int], int] | None, peer: int, tag: int) -> float:
    """Count messages of a peer with a tag, or any tag; infinite for a freed communicator."""
    if counts is None:
        return math.inf
    return sum(n for (other, theirs), n in counts.items()
               if other == peer and tag in (theirs, MPI.ANY_TAG))
