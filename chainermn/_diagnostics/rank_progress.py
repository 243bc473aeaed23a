"""The progress of this rank: how long each thread has made none, and what the rank waits for."""
from __future__ import annotations

import threading
from collections.abc import Iterator

from chainermn._diagnostics import flight_recorder, program_threads, thread_state
from chainermn._diagnostics.deadlocks import rank_state
from chainermn._diagnostics.deadlocks.rank_state import Progress, RankState
from chainermn._diagnostics.hang_report import Response
from chainermn._diagnostics.thread_state import Snapshot

_GRACE = 2.  # seconds before a rank that waits sends its state


class RankProgress:
    """The progress of this rank, as the watchdog has observed it.

    Attributes:
        state: The state of this rank; ``None`` if the rank may make progress by itself.
        is_waiting: Whether a thread has been in the same operation since an earlier observation.
    """

    def __init__(self) -> None:
        self.state: RankState | None = None
        self.is_waiting = False
        # For each thread: its progress, and the time since when it has not changed.
        self._progress: dict[int, tuple[tuple[object, ...], float]] = {}
        self._snapshots: dict[int, Snapshot] = {}
        self._entered = 0  # number of operations until the last observation

    def observe(self, now: float, grace_at_end: float) -> None:
        """Observe all threads.

        Args:
            now: The current time.
            grace_at_end: The number of seconds that a rank waits in the shutdown before ``state``
                is set.
        """
        self._snapshots = thread_state.snapshots()
        before, self._progress = self._progress, {}
        entered = flight_recorder.n_operations()
        has_entered, self._entered = entered != self._entered, entered
        for ident, snapshot in self._snapshots.items():
            progress, since = before.get(ident, ((), now))
            # A thread outside of operations may have run some since the last observation.
            is_same = snapshot.progress == progress and (progress or not has_entered)
            self._progress[ident] = snapshot.progress, since if is_same else now
        self.is_waiting = any(progress and since < now
                              for progress, since in self._progress.values())
        self.state = self._new_state(now, grace_at_end)

    def forget_threads(self) -> None:
        """Drop the snapshots, which keep objects of user code alive, until the next observation."""
        self._snapshots = {}

    def threads(self, now: float) -> Iterator[tuple[Snapshot, float]]:
        """Yield each observed thread and how many seconds it has made no progress."""
        for ident, snapshot in self._snapshots.items():
            yield snapshot, now - self._progress[ident][1]

    def main_thread(self, now: float) -> tuple[str, bool, float]:
        """Return the state of the main thread, whether it is in an operation, and for how long."""
        ident = threading.main_thread().ident
        snapshot = self._snapshots.get(ident) if ident is not None else None
        if ident is None or snapshot is None:
            return '', False, 0
        return snapshot.state.text, bool(snapshot.progress), now - self._progress[ident][1]

    def response(self, reason: str, now: float) -> Response:
        """Return the states of all threads, for a report."""
        return Response.of(reason, {
            ident: (snapshot.state, now - self._progress[ident][1])
            for ident, snapshot in self._snapshots.items()})

    def _new_state(self, now: float, grace_at_end: float) -> RankState | None:
        blocked = {ident: snapshot for ident, snapshot in self._snapshots.items()
                   if snapshot.progress}
        is_finished = [snapshot.is_finished for snapshot in blocked.values()] == [True]
        grace = grace_at_end if is_finished else _GRACE
        if not blocked or any(now - self._progress[ident][1] < grace for ident in blocked) or (
                program_threads.are_running(blocked, is_finished)):
            return None
        state = RankState(
            Progress.of_this_rank(), tuple(snapshot.state for snapshot in blocked.values()),
            is_finished, rank_state.shutdown().may_exit)
        after = {ident: snapshot.progress for ident, snapshot in thread_state.snapshots().items()}
        has_changed = after != {ident: progress for ident, (progress, _) in self._progress.items()}
        return None if has_changed else state
