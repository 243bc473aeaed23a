"""Threads write files while training goes on, one after the other; no error of theirs is lost.

The thread makes no MPI call and touches no device.  The interpreter waits for it before it ends.
"""
from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from typing import Any

_pending: set[Background] = set()  # those with a job that nobody has joined
# Each thread waits for the one before, as they may write the same file.
_newest: threading.Thread | None = None


class Background:
    """At most one job, in a thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        #: Whether a job was started and not joined.
        self.is_busy = False

    def start(self, path: str, job: Callable[[], None]) -> None:
        """Starts a job; the one before has to be joined.

        Args:
            path: The file that it writes, for the message.
            job: Holds all that it needs, in memory that nobody else changes.
        """
        global _newest
        before = _newest

        def run() -> None:
            try:
                if before is not None:
                    before.join()
                job()
            except BaseException as error:
                self._failure = f'{path}: {type(error).__name__}: {error}'

        # Registered again, so that it runs before what was registered since, such as MPI_Finalize.
        atexit.unregister(_report)
        atexit.register(_report)
        _pending.add(self)
        self.is_busy = True
        thread = threading.Thread(target=run, name=f'writes {path}')
        try:
            thread.start()
        except RuntimeError:  # there are too many threads, or the interpreter is ending
            run()
        else:
            self._thread = _newest = thread

    def wait(self) -> None:
        """Waits for the job; its error stays to be asked for."""
        if self._thread is not None:
            self._thread.join()

    def join(self) -> str | None:
        """Waits for the job, if there is one; says what went wrong, once."""
        self.wait()
        failure = self._failure
        self._thread, self._failure, self.is_busy = None, None, False
        _pending.discard(self)
        return failure


def refuse(what: str, comm: Any, failure: str) -> None:
    """Raises :func:`not_saved` on all ranks, on the others in their next collective operation."""
    comm.refuse('writing', not_saved(what, [f'rank {comm.rank}: {failure}']))


def not_saved(what: str, failures: list[str]) -> OSError:
    """The error of a rank, or of several, that could not write."""
    return OSError(f'{what} was not saved; the ones before it stay\n  ' + '\n  '.join(failures))


def wait_for_all() -> None:
    """Waits for every job of this process."""
    for background in list(_pending):
        background.wait()


def _report() -> None:
    """At the end of the program: raises what nobody asked for, which ends the job."""
    failures = [failure for background in list(_pending) if (failure := background.join())]
    if failures:
        raise OSError('not written:\n  ' + '\n  '.join(failures))


def _forget() -> None:
    global _newest
    _newest = None
    _pending.clear()


os.register_at_fork(after_in_child=_forget)  # a child has no such thread
