"""One attempt: run the job once, and record the result."""
from __future__ import annotations

import contextlib
import glob
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

from chainermn import _environment
from chainermn._run import _supervisor

_POLL_INTERVAL = 0.05  # seconds

#: From Ctrl-C; from kill or a batch system; from a closed terminal.
_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


class Attempt(NamedTuple):
    """The result of one attempt."""

    started: float  # seconds since 1970
    seconds: float
    status: int  # exit status of mpiexec, or 128 + signal number
    messages: list[str]  # from the ranks that failed, in order of time

    @property
    def duration(self) -> str:
        minutes, seconds = divmod(round(self.seconds), 60)
        return f'{minutes // 60}:{minutes % 60:02}:{seconds:02}'

    @property
    def result(self) -> str:
        return f'exit status {self.status}' if self.status else 'succeeded'


def run_once(command: list[str], environment: dict[str, str], signals: list[int]) -> Attempt:
    """Run mpiexec, and forward the first signal that is collected meanwhile.

    The job ends when this process ends, even if it is killed.
    """
    with tempfile.TemporaryDirectory(  # only this user can read it
            prefix='chainermn-run-', ignore_cleanup_errors=True) as folder:
        started, start = time.time(), time.monotonic()
        process = subprocess.Popen(
            # -I -S: skipping sitecustomize and .pth files makes it start at once.
            [sys.executable, '-I', '-S', _supervisor.__file__, *command],
            env={**environment, _environment.RUN_FOLDER: folder}, stdin=subprocess.DEVNULL,
            preexec_fn=_supervisor.die_with_parent(signal.SIGTERM),
            start_new_session=True)  # so that only this process gets Ctrl-C
        forwarded = False
        while process.poll() is None:
            if signals and not forwarded:
                forwarded = True
                process.send_signal(signals[0] if signals[0] == signal.SIGINT else signal.SIGTERM)
            time.sleep(_POLL_INTERVAL)
        return Attempt(started, time.monotonic() - start, process.returncode, _messages(folder))


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
