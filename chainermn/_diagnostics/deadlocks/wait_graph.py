"""The wait-for graph: finds ranks that wait for each other, or for finished ranks, forever.

A collective waits for all ranks that have not entered it, a send for its receiver, and a receive
for its sender, or for any one of the ranks if any of them may send. A rank is blocked if all of its
threads are blocked. Ranks that are not blocked, or whose state is unknown because they are running,
can make progress, and so can ranks that wait for them. The ranks that remain are deadlocked
(Hilbrich et al. 2012).
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import NamedTuple

from chainermn._diagnostics.deadlocks.advice import WaitingRank, advice
from chainermn._diagnostics.deadlocks.rank_state import (
    Counts,
    RankState,
    ThreadState,
    Wait,
    WaitKind,
)
from chainermn._diagnostics.flight_recorder import Key
from chainermn._operations.ranks import group_ranks, ranks_text
from chainermn._process.mpi import MPI

#: Cycles of up to _SHOWN ranks are described completely, longer ones by _SHOWN_OF_MANY ranks.
_SHOWN, _SHOWN_OF_MANY = 4, 2


class WaitGraph:
    """The wait-for graph of some ranks.

    Its size is linear in the number of ranks, because ranks with the same wait share blockers.

    Args:
        states: The states of ranks that may be blocked, by rank in COMM_WORLD.
    """

    def __init__(self, states: Mapping[int, RankState]) -> None:
        self._states = states
        self._ended = {rank for rank, state in states.items() if state.may_exit}
        self._shared: dict[Wait, _Blockers] = {}
        self._messages: dict[Key, _Messages] = {}
        #: By rank and thread: the blockers of each operation.
        self._blockers = {rank: [[self._find(wait, rank) for wait in thread.waits]
                                 for thread in state.threads] for rank, state in states.items()}

    def deadlocked(self) -> set[int]:
        """Return the ranks that wait forever, except finished ranks."""
        waiting, free = set(self._states), []
        threads: dict[_Blockers, list[_Thread]] = {}  # by blockers: the threads that they block
        for rank, found in self._blockers.items():
            if rank in self._ended:
                continue
            if not found:
                free.append(rank)
            for each in found:
                thread = _Thread(rank)
                for blockers in each:
                    if blockers.remain(waiting):
                        thread.blockers += 1
                        threads.setdefault(blockers, []).append(thread)
                if not thread.blockers:
                    free.append(rank)
        blocking: dict[int, list[_Blockers]] = {}  # by rank
        for blockers in threads:
            blockers.left = len(blockers.ranks & waiting)
            for rank in blockers.ranks:
                blocking.setdefault(rank, []).append(blockers)
        while free:
            rank = free.pop()
            if rank not in waiting:
                continue
            waiting.remove(rank)
            for blockers in blocking.get(rank, ()):
                blockers.left -= 1
                if blockers.needs_all or not blockers.left:
                    for thread in threads.pop(blockers, ()):
                        thread.blockers -= 1
                        if not thread.blockers:
                            free.append(thread.rank)
        return waiting - self._ended

    def awaited(self, rank: int, waiting: Set[int]) -> Iterator[_Edge]:
        """Yield the blocking operations of a rank, and the ranks that each waits for.

        Args:
            rank: The rank.
            waiting: The ranks that make no progress.
        """
        for thread, found in zip(self._states[rank].threads, self._blockers[rank], strict=True):
            for wait, blockers in zip(thread.waits, found, strict=True):
                if blockers.remain(waiting):
                    yield _Edge(thread, wait, (blockers.ranks & waiting) - {rank})

    def awaited_by(self, ranks: Iterable[int], waiting: Set[int]) -> set[int]:
        """Return all ranks that the given ranks wait for.

        Args:
            ranks: The ranks that wait.
            waiting: The ranks that make no progress.
        """
        users = group_ranks((rank, blockers) for rank in ranks for thread in self._blockers[rank]
                            for blockers in thread)
        found: set[int] = set()
        for blockers, own in users.items():
            if blockers.remain(waiting):
                found |= (blockers.ranks & waiting) - (set(own) if len(own) == 1 else set())
        return found

    def _find(self, wait: Wait, rank: int) -> _Blockers:
        """Return the ranks that block an operation of a rank, if they make no progress."""
        ranks = wait.key[1]
        if wait.kind is WaitKind.SEND:
            receiver = ranks[wait.peer]
            return _Blockers({receiver} if self._is_unreceived(wait, rank, receiver) else set())
        if wait.kind is WaitKind.RECEIVE:
            if self._messages_of(wait.key).may_come(rank, wait.peer, wait.tag):
                return _NONE
            if wait.peer >= 0:
                return _Blockers({ranks[wait.peer]} - {rank}, needs_all=True)
            # Any rank could send the message, including this rank itself, which waits.
            wait = wait._replace(tag=0)
        if wait not in self._shared:
            self._shared[wait] = self._find_shared(wait)
        return self._shared[wait]

    def _find_shared(self, wait: Wait) -> _Blockers:
        """Return the ranks that block an operation of every rank with the same wait."""
        ranks = wait.key[1]
        if wait.kind is WaitKind.RECEIVE:
            return _Blockers(set(ranks) if len(ranks) > 1 else set(), needs_all=True)
        if wait.kind is WaitKind.ASK:
            are_blocked = all(any(
                thread.service == wait.key for thread in self._states[other].threads)
                for other in wait.asked if other in self._states)
            return _Blockers(set(wait.asked) if are_blocked else set(), needs_all=True)
        return _Blockers({
            other for other in ranks
            if other in self._states and self._entered(wait, other) < wait.number})

    def _entered(self, wait: Wait, rank: int) -> float:
        progress = self._states[rank].progress
        if wait.kind is WaitKind.CREATION:
            return progress.creations.get(wait.key[1], 0)
        return progress.entered.get(wait.key, math.inf)  # infinite for a freed communicator

    def _is_unreceived(self, wait: Wait, rank: int, receiver: int) -> bool:
        if receiver not in self._states:
            return False
        messages = self._messages_of(wait.key)
        me = messages.place[rank]
        return (messages.received[receiver].count(me, wait.tag)
                + messages.receiving[receiver].count(me, wait.tag)
                < messages.sent[rank].count(wait.peer, wait.tag))

    def _messages_of(self, key: Key) -> _Messages:
        if key not in self._messages:
            self._messages[key] = _Messages(key, self._states)
        return self._messages[key]

    def cycle(self, deadlocked: Set[int]) -> str:
        """Describe ranks that wait for each other or for finished ranks, and give advice."""
        waiting = deadlocked | self._ended
        rank = min(deadlocked)
        path: list[int] = []
        edges: dict[int, _Edge] = {}
        while rank in deadlocked and rank not in edges:
            path.append(rank)
            edges[rank] = next(self.awaited(rank, waiting))
            awaited = edges[rank].awaited
            seen = {each for each in awaited if each in edges}
            rank = min(seen if seen and len(path) > _SHOWN else awaited - seen or seen)
        end = f'rank {rank} has reached the end of the script'
        if rank in edges:
            path, end = path[path.index(rank):], ''
        texts = [f'rank {each} waits {edges[each].thread.wait_text} for '
                 f'{ranks_text(sorted(edges[each].awaited))}' for each in path[:_SHOWN]]
        if len(path) > _SHOWN:
            texts[_SHOWN_OF_MANY:] = [f'and so on; {len(deadlocked)} ranks are deadlocked']
        steps = [WaitingRank(each, edges[each].thread, edges[each].wait, following,
                             following not in edges, self._other_tags(each, edges[each].wait))
                 for each, following in zip(path, [*path[1:], rank], strict=True)]
        return '; '.join(texts + [end] * bool(end)) + f'\n{advice(steps)}'

    def _other_tags(self, rank: int, wait: Wait) -> list[int]:
        """Return the tags of messages from the awaited rank that a rank has not received."""
        if wait.kind is not WaitKind.RECEIVE or wait.peer < 0 or wait.tag < 0:
            return []
        messages = self._messages_of(wait.key)
        me, sender = messages.place[rank], wait.key[1][wait.peer]
        if sender not in messages.sent:
            return []
        return [tag for tag in messages.sent[sender].tags(me)
                if messages.sent[sender].count(me, tag)
                > messages.received[rank].count(wait.peer, tag)]


class _Edge(NamedTuple):
    """An operation that a rank waits in."""

    thread: ThreadState
    wait: Wait
    awaited: set[int]  # ranks


class _Blockers:
    """The ranks that block an operation while any (``needs_all``: all) of them make no progress."""

    __slots__ = 'left', 'needs_all', 'ranks'

    def __init__(self, ranks: set[int], needs_all: bool = False) -> None:
        self.ranks = ranks
        self.needs_all = needs_all
        self.left = 0  # the number of ranks not yet found to make progress

    def remain(self, waiting: Set[int]) -> bool:
        if self.needs_all:
            return bool(self.ranks) and self.ranks <= waiting
        return not self.ranks.isdisjoint(waiting)


_NONE = _Blockers(set())


class _Thread:
    """A thread that is blocked in at least one of its operations."""

    __slots__ = 'blockers', 'rank'

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.blockers = 0  # the number of blockers


class _Messages:
    """The messages of a communicator."""

    def __init__(self, key: Key, states: Mapping[int, RankState]) -> None:
        self.ranks = key[1]
        #: The rank in the communicator, by rank in COMM_WORLD.
        self.place = {rank: n for n, rank in enumerate(self.ranks)}
        progress = {rank: states[rank].progress for rank in self.ranks if rank in states}
        # The numbers of messages, by rank in COMM_WORLD.
        self.sent = {rank: _Counts(each.sent.get(key)) for rank, each in progress.items()}
        self.received = {rank: _Counts(each.received.get(key)) for rank, each in progress.items()}
        self.receiving = {rank: _Counts(each.receiving.get(key, {}))
                          for rank, each in progress.items()}
        self._is_complete = len(progress) == len(self.ranks) and all(
            key in each.sent for each in progress.values())
        self._senders: dict[int, set[int]] = {}  # by receiver
        for rank, each in progress.items():
            for dest, _ in each.sent.get(key, ()):
                self._senders.setdefault(dest, set()).add(self.place[rank])

    def may_come(self, rank: int, peer: int, tag: int) -> bool:
        """Return whether a message may arrive: it is in flight, or a sender's state is unknown."""
        me = self.place[rank]
        if peer >= 0:
            senders = {peer}
        elif self._is_complete:
            senders = self._senders.get(me, set())
        else:
            return True
        return any(self.ranks[each] not in self.sent or self.sent[self.ranks[each]].count(me, tag)
                   > self.received[rank].count(each, tag) for each in senders)


class _Counts:
    """The messages of one rank, counted by peer and tag; ``None`` for a freed communicator."""

    def __init__(self, counts: Counts | None) -> None:
        self._counts = counts
        self._by_peer: dict[int, int] | None = None

    def tags(self, peer: int) -> list[int]:
        """Return the tags of a peer's messages; none for a freed communicator."""
        return [tag for other, tag in self._counts or () if other == peer]

    def count(self, peer: int, tag: int) -> float:
        """Count a peer's messages with a tag, or any tag; infinite for a freed communicator."""
        if self._counts is None:
            return math.inf
        if tag != MPI.ANY_TAG:
            return self._counts.get((peer, tag), 0)
        if self._by_peer is None:
            self._by_peer = {}
            for (other, _), n in self._counts.items():
                self._by_peer[other] = self._by_peer.get(other, 0) + n
        return self._by_peer.get(peer, 0)
