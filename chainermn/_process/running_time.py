"""A clock that stops while this process is stopped, for example by Ctrl-Z or ``scontrol suspend``.

The clocks of the system do not stop. If timeouts used them, all timeouts of a job would expire as
soon as it continues. The watchdog polls the clock of its process; each command polls its own clock.
"""
from __future__ import annotations

import time

from chainermn._process import runtime

#: Seconds by which a poll may be late, as on a busy node, without time being excluded.
_LATE = 1.


class RunningClock(runtime.ProcessState):
    """Measures the seconds in which this process was not stopped, as far as its polls show."""

    def __init__(self) -> None:
        self._time = self._polled_at = time.monotonic()

    def poll(self, pause: float = 0.) -> float:
        """Return the time. Must be called regularly.

        Args:
            pause: The intended number of seconds since the last call. If the last call was much
                longer ago, the process was stopped in between.
        """
        now = time.monotonic()
        self._time += min(now - self._polled_at, pause + _LATE)
        self._polled_at = now
        return self._time

    def peek(self) -> float:
        """Return the time of the last poll plus the time since then, excluding stops."""
        return self._time + min(time.monotonic() - self._polled_at, _LATE)
