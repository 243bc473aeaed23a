"""mpiexec's parent: a process that lets nothing of a job outlive it, nor itself its own parent.

It is started as a file, ``python _keeper.py MPIEXEC ARGS...``, and ends with the exit status of
mpiexec, or 128 + the signal that ended that.  Where nobody is left to read what failed ranks have
left in ``$CHAINERMN_RUN_FOLDER``, it removes that folder.
"""
from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

_EVERY = 0.05  # seconds between two looks at mpiexec
_ENDED_WITHIN = 5  # seconds that mpiexec has to end, when it is told to

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h


def ending_with_parent(number: int) -> Callable[[], Any]:
    """What asks Linux, in a new process, for that signal when this process ends."""
    prctl, here = ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != here:
            os._exit(1)

    return ask


def main(command: list[str]) -> int:
    """Runs mpiexec to its end."""
    parent = os.getppid()
    noted: list[int] = []  # signals of the parent, or that it has ended
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: noted.append(number))
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # for _kill_children
    process = subprocess.Popen(
        # Not SIGTERM, which MPICH's mpiexec only passes on to ranks that may ignore it.
        command, stdin=subprocess.DEVNULL, preexec_fn=ending_with_parent(signal.SIGKILL))
    kill_at = None
    while process.poll() is None:
        if noted and kill_at is None:
            process.send_signal(noted[0])
            kill_at = time.monotonic() + _ENDED_WITHIN
        if kill_at is not None and time.monotonic() > kill_at:
            process.kill()
        time.sleep(_EVERY)
    if process.returncode:
        _kill_children()
    if os.getppid() != parent:
        shutil.rmtree(os.environ['CHAINERMN_RUN_FOLDER'], ignore_errors=True)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _kill_children() -> None:
    """Ends what a failed job has left, such as the data loaders of a rank that was killed.

    All that loses its parent becomes a child of this process.
    """
    while children := _children():
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def _children() -> list[int]:
    here = os.getpid()
    with open(f'/proc/{here}/task/{here}/children') as file:  # there is one thread
        return [int(child) for child in file.read().split()]


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
