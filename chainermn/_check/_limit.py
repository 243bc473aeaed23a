"""A time limit for all of the check: what hangs is named, instead of waiting forever."""
from __future__ import annotations

import faulthandler
import os
import threading
from types import TracebackType

from chainermn import _streams


class Limit:
    """Ends the process after some seconds, unless the body of the with statement has ended."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer = threading.Timer(seconds, self._say)
        self._timer.daemon = True
        #: What the process is doing.
        self.stage = ''

    def __enter__(self) -> Limit:
        self._timer.start()
        # In C, which ends also a process that holds the interpreter.
        faulthandler.dump_traceback_later(self._seconds + 1, exit=True, file=2)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 tb: TracebackType | None) -> None:
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    def _say(self) -> None:
        rank = next((f'rank {os.environ[name]}' for name in ('PMI_RANK', 'OMPI_COMM_WORLD_RANK')
                     if name in os.environ), 'the process')
        _streams.write(f'chainermn check: {rank} on {os.uname().nodename} has not got on for '
                       f'{self._seconds:g} s while {self.stage}\n')
