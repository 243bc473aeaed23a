"""Skips MPI finalization in forked children, because they are not ranks.

In a child, MPI_Finalize would wait for the other ranks on behalf of the parent, or corrupt state
that the two share. mpi4py calls it after the interpreter has cleared all modules. Therefore, the
child exits just before that, with the exit status that it would have had anyway.
"""
from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import sys

from chainermn._process import exit_status, runtime

_os_exit = os._exit


class _Fork(runtime.ProcessState):
    """The parent, if this process is a forked child of a rank."""

    def __init__(self) -> None:
        self.parent = 0

    def in_child(self) -> bool:
        mpi = sys.modules.get('mpi4py.MPI')
        # Another thread may be importing mpi4py.
        with contextlib.suppress(AttributeError):
            if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
                self.parent = self.parent or os.getppid()
                exit_status.listen()
                exit_status.outcome().status = 0
                # The interpreter clears sys last, and within it, names with an underscore first.
                sys._end_of_a_child_of_chainermn = (  # type: ignore[attr-defined]
                    _ExitOnDelete())
        return True


def skip_mpi_finalize_in_children() -> None:
    """Make all children forked from now on skip MPI_Finalize."""
    runtime.get(_Fork)


def parent() -> int:
    """Return the ID of the rank's process that forked this one, or 0 if this is not such a child.

    Only forks while MPI was initialized count.
    """
    return runtime.get(_Fork).parent


class _ExitOnDelete:
    """Exits the process when it is deleted.

    It keeps references to the functions that it needs, because modules are empty by then.
    """

    def __init__(self) -> None:
        self._outcome = exit_status.outcome()
        self._sys = sys
        self._exit, self._kill, self._process = _os_exit, os.kill, os.getpid()
        library = ctypes.CDLL(None)
        self._flush_c_files, self._set_handler = library.fflush, library.signal
        self._clear_atexit, self._collect = atexit._clear, gc.collect

    def __del__(self) -> None:
        status = self._outcome.status
        try:
            self._clear_atexit()  # the callbacks may refer to files that are not flushed yet
            self._collect()
            for name in ('stdout', 'stderr'):
                stream = getattr(self._sys, name, None)
                if stream is not None and not stream.closed:
                    stream.flush()
            self._flush_c_files(None)
            if status < 0:
                self._set_handler(-status, None)
                self._kill(self._process, -status)
        except Exception:
            status = 120  # as the interpreter does
        finally:
            self._exit(status)
