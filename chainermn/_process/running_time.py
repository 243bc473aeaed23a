"""A clock that stands still while this process is stopped, as by Ctrl-Z or ``scontrol suspend``.

The clocks of the system go on meanwhile, so a job that continues would find that all of its
timeouts have expired. The watchdog polls the clock of the process, and commands their own clocks.
"""
from __future__ import annotations

import time

from chainermn._process import runtime

#: Seconds by which a poll may be late, on a busy node, and still count completely.
_LATE = 1.


class RunningClock(runtime.ProcessState):
    """Measures seconds in which this process could run, as far as its polls show."""

    def __init__(self) -> None:
        self._time = self._polled_at = time.monotonic()

    def poll(self, pause: float = 0.) -> float:
        """Return the time. Call it regularly.

        Args:
            pause: The seconds for which the caller has not called it on purpose. If the last call
                was much longer ago, the process was stopped in between.
        """
        now = time.monotonic()
        self._time += min(now - self._polled_at, pause + _LATE)
        self._polled_at = now
        return self._time

    def peek(self) -> float:
        """Return the time of the last poll plus the time since then, without stops."""
        return self._time + min(time.monotonic() - self._polled_at, _LATE)
