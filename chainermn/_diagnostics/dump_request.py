"""Requests for the state of all ranks while the job runs: SIGUSR1, ``dump`` and ``top``.

A Python signal handler does not run while the main thread waits in MPI. The handler of faulthandler
does, because it is written in C: it writes the stack to a file in memory, which the watchdog polls.
The commands find this file in ``/proc`` and write to it: ``top`` writes the name of a socket,
to which this rank connects. Only processes of the same user can open the file. Its name contains
an identifier of the job, which the ranks on this host share.
"""
from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal

from chainermn._process import launcher, runtime
from chainermn._process.mpi import MPI

#: The beginning of the name of the file.
NAME = 'chainermn-dump-'

#: A request of ``top``, with the name of its socket.
_TOP = re.compile(rb'top ([0-9a-f]{32})\n')
_MAX_BYTES = 1 << 16


class _Requests(runtime.ProcessState):
    """The file to which requests to this process are written."""

    def __init__(self) -> None:
        self.file = -1  # no file

    def in_child(self) -> bool:
        if self.file >= 0:
            faulthandler.unregister(signal.SIGUSR1)
            with contextlib.suppress(OSError):
                os.close(self.file)
        return False


def listen() -> None:
    """Accept requests. If user code handles or ignores SIGUSR1, its handler remains installed."""
    requests = runtime.get(_Requests)
    if requests.file >= 0 or not hasattr(os, 'memfd_create'):
        return
    with contextlib.suppress(OSError):
        requests.file = os.memfd_create(NAME + _job())
        # MPICH handles SIGUSR1 as well, but its mpiexec sends the signal only in jobs that continue
        # when a rank fails.
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            faulthandler.register(signal.SIGUSR1, requests.file, all_threads=False)


def are_pending() -> bool:
    """Return whether there are requests."""
    with contextlib.suppress(OSError):  # there is no file, or user code has closed it
        return os.fstat(runtime.get(_Requests).file).st_size > 0
    return False


def requests() -> tuple[bool, list[str]]:
    """Return whether a report was requested since the last call, and the sockets of ``top``."""
    file = runtime.get(_Requests).file
    if file >= 0:
        with contextlib.suppress(OSError):  # user code has closed it
            if size := os.fstat(file).st_size:
                text = os.pread(file, min(size, _MAX_BYTES), 0)
                os.ftruncate(file, 0)
                os.lseek(file, 0, os.SEEK_SET)
                names = _TOP.findall(text)
                return bool(_TOP.sub(b'', text).strip(b'\0\n')), [each.decode() for each in names]
    return False, []


def _job() -> str:
    """Return an identifier of the job on this host."""
    # Without a known launcher, ranks are the children of one process.
    return launcher.job() or str(os.getpid() if MPI.COMM_WORLD.size == 1 else os.getppid())
