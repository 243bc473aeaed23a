"""One attempt: run the job once, and record the result."""
from __future__ import annotations

import contextlib
import glob
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from chainermn import _environment
from chainermn._run import _supervisor
from chainermn._run._pool import Ending

_POLL_INTERVAL = 0.05  # seconds

#: From Ctrl-C; from kill or a batch system; from a closed terminal.
_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


class Attempt(NamedTuple):
    """The result of one attempt."""

    started: float  # seconds since 1970
    seconds: float
    status: int  # exit status of mpiexec, or 128 + signal number
    messages: list[str]  # from the ranks that failed, in order of time
    ranks: Mapping[str, int]  # on each host; empty without a hosts file
    ending: Ending | None  # why this command ended it

    @property
    def duration(self) -> str:
        minutes, seconds = divmod(round(self.seconds), 60)
        return f'{minutes // 60}:{minutes % 60:02}:{seconds:02}'

    @property
    def result(self) -> str:
        if self.status and self.ending is not None:
            return self.ending.reason
        return f'exit status {self.status}' if self.status else 'succeeded'

    @property
    def is_planned(self) -> bool:
        """Whether it was ended to restart it with more ranks."""
        return self.status != 0 and self.ending is not None and self.ending.is_planned


def run_once(command: list[str], environment: dict[str, str], signals: list[int],
             ranks: Mapping[str, int] | None = None,
             watch: Callable[[], Ending | None] = lambda: None) -> Attempt:
    """Run mpiexec, and forward the first signal that is collected meanwhile.

    The job ends when this process ends, even if it is killed.

    Args:
        command: The command of mpiexec.
        environment: Its environment.
        signals: Where the signals are collected.
        ranks: The number of ranks on each host, for the result.
        watch: Returns why to end the job with SIGTERM, or ``None``.
    """
    with tempfile.TemporaryDirectory(  # only this user can read it
            prefix='chainermn-run-', ignore_cleanup_errors=True) as folder:
        started, start = time.time(), time.monotonic()
        process = _supervisor.start(command, {**environment, _environment.RUN_FOLDER: folder})
        ending, has_sent = None, False
        while process.poll() is None:
            if not has_sent and (signals or (ending := watch())):
                has_sent = True
                process.send_signal(signals[0] if signals[:1] == [signal.SIGINT]
                                    else signal.SIGTERM)
            time.sleep(_POLL_INTERVAL)
        return Attempt(started, time.monotonic() - start, process.returncode,
                       _messages(folder), ranks or {}, ending)


@contextlib.contextmanager
def collect_signals() -> Iterator[list[int]]:
    """Collect signals in a list instead of letting them end this process."""
    collected: list[int] = []
    before = {number: signal.signal(number, lambda number, _: collected.append(number))
              for number in _SIGNALS
              if signal.getsignal(number) is not signal.SIG_IGN}  # such as by nohup
    try:
        yield collected
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _messages(folder: str) -> list[str]:
    """Return the messages of failed ranks, one line each."""
    texts = []
    for path in sorted(glob.glob(f'{glob.escape(folder)}/*.txt')):
        with open(path) as file:
            texts.append(' '.join(file.read().split()))
    return texts
