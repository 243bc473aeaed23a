"""A forked child of a rank is no rank: MPI is left alone when it ends.

MPI's finalizer would wait for the other ranks in place of the child's parent, or break what the
two share.  mpi4py calls it after the interpreter has cleared all modules.  So the child ends just
before, with the exit status that it would have had.
"""
from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import sys

from chainermn import _exit_status

#: The process of the rank from which this one was forked while MPI ran; 0 if it was not.
parent = 0

_os_exit = os._exit


def leave_mpi_alone() -> None:
    """Lets all children that are forked from now on end in this way."""
    os.register_at_fork(after_in_child=_in_child)


class _End:
    """Ends the process when it is deleted.

    The functions are kept here, as modules have nothing in them by then.
    """

    def __init__(self) -> None:
        self._outcome = _exit_status.outcome
        self._sys = sys
        self._exit, self._kill, self._process = _os_exit, os.kill, os.getpid()
        library = ctypes.CDLL(None)
        self._flush_c_files, self._set_handler = library.fflush, library.signal
        self._forget_functions, self._collect = atexit._clear, gc.collect

    def __del__(self) -> None:
        status = self._outcome.status
        try:
            self._forget_functions()  # of atexit, which may hold files that are not written yet
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
            status = 120  # as the interpreter has it
        finally:
            self._exit(status)


def _in_child() -> None:
    global parent
    mpi = sys.modules.get('mpi4py.MPI')
    # An import of it may be under way in another thread.
    with contextlib.suppress(AttributeError):
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            parent = parent or os.getppid()
            _exit_status.listen()
            _exit_status.outcome.status = 0
            # The interpreter clears this module last, and names with an underscore first in it.
            sys._end_of_a_child_of_chainermn = _End()  # type: ignore[attr-defined]
