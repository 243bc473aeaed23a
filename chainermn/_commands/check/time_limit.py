"""A time limit for the whole check: report the step that hangs, then exit."""
from __future__ import annotations

import faulthandler
import os
import threading
from types import TracebackType

from chainermn._commands.check import system_info
from chainermn._process import streams


class TimeLimit:
    """Context manager that terminates the process if its body takes longer than ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer = threading.Timer(seconds, self._report)
        self._timer.daemon = True
        #: The current activity, for the error message.
        self.step = ''

    def __enter__(self) -> TimeLimit:
        self._timer.start()
        # Implemented in C, so it works even while another thread holds the GIL.
        faulthandler.dump_traceback_later(self._seconds + 1, exit=True, file=2)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 tb: TracebackType | None) -> None:
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    def _report(self) -> None:
        rank = system_info.rank()
        who = 'the process' if rank is None else f'rank {rank}'
        streams.write(f'chainermn check: {who} on {os.uname().nodename} timed out after '
                       f'{self._seconds:g} s while {self.step}\n')
