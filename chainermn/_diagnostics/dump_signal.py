"""SIGUSR1 asks for the state of all ranks, without ending the job.

A Python signal handler does not run while the main thread waits in MPI.  That of faulthandler does:
it writes the stack to a pipe, which tells the watchdog that there was a signal.
"""
from __future__ import annotations

import contextlib
import faulthandler
import os
import signal

SIGNAL = signal.SIGUSR1

_read = _write = -1
_process = 0


def listen() -> None:
    """Handles the signal, unless the program handles or ignores it."""
    global _read, _write, _process
    # MPICH handles it too, but no mpiexec sends it unless a rank may fail without the others.
    if _process == os.getpid() or signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return
    _process = os.getpid()
    _read, _write = os.pipe()
    for file in (_read, _write):
        os.set_blocking(file, False)
    faulthandler.register(SIGNAL, _write, all_threads=False)
    os.register_at_fork(after_in_child=_ignore)


def is_requested() -> bool:
    """Returns whether there was a signal since the last call."""
    if _process != os.getpid():
        return False
    with contextlib.suppress(BlockingIOError):
        return len(os.read(_read, 1 << 16)) > 0
    return False


def _ignore() -> None:
    """In a forked child, which is no rank."""
    faulthandler.unregister(SIGNAL)
