"""One attempt: a job from its start to its end, and what is known about that."""
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
from chainermn._run import _keeper

_EVERY = 0.05  # seconds between two looks at the job

#: By Ctrl-C; by kill or a batch system; by the end of the terminal.
_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


class Attempt(NamedTuple):
    """How it went."""

    started: float  # seconds since 1970
    seconds: float
    status: int  # exit status of mpiexec, or 128 + the signal that ended it
    messages: list[str]  # of the ranks that failed, the first one first

    @property
    def lasted(self) -> str:
        minutes, seconds = divmod(round(self.seconds), 60)
        return f'{minutes // 60}:{minutes % 60:02}:{seconds:02}'

    @property
    def how(self) -> str:
        return f'exit status {self.status}' if self.status else 'well'


def attempt(command: list[str], environment: dict[str, str], signals: list[int]) -> Attempt:
    """Runs mpiexec to its end, and passes on the first of the signals that are noted meanwhile.

    When this process ends, whatever ends it, the job does, too.
    """
    with tempfile.TemporaryDirectory(  # readable by this user only
            prefix='chainermn-run-', ignore_cleanup_errors=True) as folder:
        started, start = time.time(), time.monotonic()
        process = subprocess.Popen(
            # Without what sitecustomize and .pth files do: it is there at once.
            [sys.executable, '-I', '-S', _keeper.__file__, *command],
            env={**environment, _environment.RUN_FOLDER: folder}, stdin=subprocess.DEVNULL,
            preexec_fn=_keeper.ending_with_parent(signal.SIGTERM),
            start_new_session=True)  # Ctrl-C is for this process
        passed_on = False
        while process.poll() is None:
            if signals and not passed_on:
                passed_on = True
                process.send_signal(signals[0] if signals[0] == signal.SIGINT else signal.SIGTERM)
            time.sleep(_EVERY)
        return Attempt(started, time.monotonic() - start, process.returncode, _messages(folder))


@contextlib.contextmanager
def noting_signals() -> Iterator[list[int]]:
    """A list of the signals that arrive from now on, which have no other effect."""
    noted: list[int] = []
    before = {number: signal.signal(number, lambda number, _: noted.append(number))
              for number in _SIGNALS
              if signal.getsignal(number) is not signal.SIG_IGN}  # as nohup has it
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _messages(folder: str) -> list[str]:
    """What ranks that failed have left, on one line each."""
    texts = []
    for path in sorted(glob.glob(f'{glob.escape(folder)}/*.txt')):
        with open(path) as file:
            texts.append(' '.join(file.read().split()))
    return texts
