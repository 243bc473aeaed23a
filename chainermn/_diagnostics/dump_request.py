"""Requests for the state of all ranks, without ending the job: SIGUSR1, and the dump command.

A Python signal handler does not run while the main thread waits in MPI.  The one of faulthandler
does, since it is written in C: it writes the stack to a file in memory, which the watchdog polls.
The dump command finds this file in ``/proc``, and writes to it, too.
"""
from __future__ import annotations

import contextlib
import faulthandler
import os
import signal

#: The name of the file.
NAME = 'chainermn-dump'

_file = -1
_process = 0


def listen() -> None:
    """Accept requests.  A program that handles SIGUSR1, or ignores it, keeps its handler."""
    global _file, _process
    if _process == os.getpid() or not hasattr(os, 'memfd_create'):
        return
    with contextlib.suppress(OSError):
        _file = os.memfd_create(NAME)
        _process = os.getpid()
        os.register_at_fork(after_in_child=_close)
        # MPICH handles it too, but mpiexec only sends it if ranks may fail without the others.
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            faulthandler.register(signal.SIGUSR1, _file, all_threads=False)


def is_requested() -> bool:
    """Return whether there was a request since the last call."""
    if _process == os.getpid():
        with contextlib.suppress(OSError):  # the program has closed it
            if os.fstat(_file).st_size:
                os.ftruncate(_file, 0)
                os.lseek(_file, 0, os.SEEK_SET)
                return True
    return False


def _close() -> None:
    """In a forked child, which is no rank."""
    faulthandler.unregister(signal.SIGUSR1)
    with contextlib.suppress(OSError):
        os.close(_file)
