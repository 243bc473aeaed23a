"""Detects deadlocks of running ranks, on the first rank of a group, from the states of all ranks.

A rank that has waited for a while sends its state and notifies the detector when it resumes.
States from different times could contradict each other. So if they contain a deadlock, the detector
starts a confirmation round: it asks the deadlocked ranks again. If no state has changed, all
states held at the same time.
"""
from __future__ import annotations

import time

from chainermn._diagnostics.deadlocks.rank_state import RankState
from chainermn._diagnostics.deadlocks.wait_graph import WaitGraph

# A search slows down this rank. If it takes more than _SHORT CPU seconds, the detector pauses for
# _PAUSE times as long.
_SHORT, _PAUSE = .01, 20


class DeadlockDetector:
    """Collects the states of waiting ranks. Ranks are numbered as in COMM_WORLD."""

    def __init__(self) -> None:
        self.states: dict[int, RankState] = {}
        self._since: dict[int, float] = {}
        self._has_warned = False
        self._round = 0
        self._suspects: set[int] = set()
        self._unconfirmed: set[int] = set()  # suspects that have not responded
        self._has_changed = False
        self._search_at = 0.  # the earliest time of the next search

    def set_state(self, rank: int, state: RankState | None, now: float = 0) -> None:
        """Replace the state of a rank; ``None`` if the rank makes progress."""
        if self.states.get(rank) != state:
            self._has_changed = True
            if rank in self._suspects:
                self._suspects = set()
            self.states.pop(rank, None)
            if state is not None:
                self.states[rank] = state
                self._since[rank] = now

    def new_suspects(self) -> tuple[int, set[int]]:
        """Start a confirmation round if the states contain a deadlock.

        Returns:
            The number of the round, and the ranks that have to respond, if any.
        """
        if not self._has_changed or time.monotonic() < self._search_at:
            return self._round, set()
        self._has_changed = False
        start = time.thread_time()
        suspects = WaitGraph(self.states).deadlocked()
        if (took := time.thread_time() - start) > _SHORT:
            self._search_at = time.monotonic() + _PAUSE * took
        if suspects == self._suspects:
            return self._round, set()
        self._suspects, self._unconfirmed = suspects, set(suspects)
        self._round += 1
        return self._round, set(suspects)

    def confirm(self, rank: int, number: int, state: RankState | None, now: float = 0) -> str:
        """Record the response of a rank; describe the deadlock once all ranks have confirmed it.

        Args:
            rank: The rank.
            number: The number of the round.
            state: The state of the rank.
            now: The current time.

        Returns:
            The description of the deadlock, or '' if it is not confirmed yet.
        """
        self.set_state(rank, state, now)
        if number != self._round or not self._suspects:
            return ''
        self._unconfirmed.discard(rank)
        return '' if self._unconfirmed else WaitGraph(self.states).cycle(self._suspects)

    def is_stalled(self, now: float, seconds: float) -> bool:
        """Return True, once for each stall, if ranks have been waiting for ``seconds``."""
        stalled = any(not state.is_finished and now - self._since[rank] > seconds
                      for rank, state in self.states.items())
        is_new, self._has_warned = stalled and not self._has_warned, stalled
        return is_new
