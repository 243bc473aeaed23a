"""The signals that this command handles: some stop the job, others are forwarded to its ranks."""
from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Collection, Iterator
from types import FrameType

from chainermn._commands.run.job_report import say

#: Signals that stop the job: from Ctrl-C, from kill or a batch system, from a closed terminal.
_ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
#: Notices that batch systems send some time before they stop a job. User code handles them.
_NOTICES = signal.SIGUSR1, signal.SIGUSR2
_REPEATED_AFTER = 1  # seconds; until then, SIGINT may be the same Ctrl-C, resent by a wrapper


class Signals:
    """The signals that this process has received.

    Args:
        forwarded: The notices that mpiexec forwards to the ranks.
    """

    def __init__(self, forwarded: Collection[int]) -> None:
        self.ending: int | None = None  # the first signal that stops the job
        self.is_urgent = False  # whether SIGINT followed the first signal
        self._forwarded = forwarded
        self._notices: list[int] = []
        self._ending_at = 0.

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Collect signals instead of letting them terminate this process."""
        before = {number: signal.signal(number, self._handle) for number in (*_ENDING, *_NOTICES)
                  if signal.getsignal(number) is not signal.SIG_IGN}  # for example, by nohup
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def forget_notices(self) -> None:
        """Discard the notices that arrived while there was no job."""
        self._notices.clear()

    def forward_notices(self, process: subprocess.Popen[bytes]) -> None:
        """Forward new notices to a supervisor."""
        while self._notices:
            number = self._notices.pop(0)
            if number in self._forwarded:
                process.send_signal(number)
            else:
                say(f'{signal.Signals(number).name} was ignored, because this mpiexec does not '
                    'forward it to the ranks; use SIGUSR1 instead')

    def _handle(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if number in _NOTICES:
            self._notices.append(number)
        elif self.ending is None:
            self.ending, self._ending_at = number, now
        elif number == signal.SIGINT and now > self._ending_at + _REPEATED_AFTER:
            self.is_urgent = True
