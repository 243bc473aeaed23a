"""Writes files in threads while training continues.

The threads call no MPI functions and use no device. The interpreter waits for them when it exits.
"""
from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

from chainermn._process import runtime


class _Writers(runtime.ProcessState):
    """The writers of this process. A forked child has none of their threads."""

    def __init__(self) -> None:
        self.pending: set[BackgroundWriter] = set()  # with a job that has not been joined
        #: Each thread waits for the previous one, because both may write the same file.
        self.newest: threading.Thread | None = None


class BackgroundWriter:
    """Runs one job at a time in a thread and keeps its error until ``join``."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: str | None = None

    def start(self, path: str, job: Callable[[], None],
              first: Callable[[], None] = lambda: None) -> None:
        """Start a job. The previous job must be joined.

        Args:
            path: Path of the file that the job writes, for error messages.
            job: Function that only uses memory that nothing else changes.
            first: Function that is called first, even while jobs of other writers are running. It
                must not raise an error.
        """
        writers = runtime.get(_Writers)
        before = writers.newest

        def run() -> None:
            try:
                first()
                if before is not None:
                    before.join()
                job()
            except BaseException as error:
                self._failure = f'{path}: {type(error).__name__}: {error}'

        # Register it again, so that it runs before functions that were registered in the meantime,
        # such as MPI_Finalize.
        atexit.unregister(_raise_failures)
        atexit.register(_raise_failures)
        writers.pending.add(self)
        thread = threading.Thread(target=run, name=f'writes {path}')
        try:
            thread.start()
        except RuntimeError:  # there are too many threads, or the interpreter is exiting
            run()
        else:
            self._thread = writers.newest = thread

    def wait(self) -> None:
        """Wait for the job; :meth:`join` still returns its error."""
        if self._thread is not None:
            self._thread.join()

    def join(self) -> str | None:
        """Wait for the job, if there is one.

        Returns:
            The error of the job, or ``None``. An error is returned only once.
        """
        self.wait()
        failure = self._failure
        self._thread, self._failure = None, None
        runtime.get(_Writers).pending.discard(self)
        return failure


def wait_for_all() -> None:
    """Wait for all jobs of this process."""
    for writer in list(runtime.get(_Writers).pending):
        writer.wait()


def _raise_failures() -> None:
    """Raise the errors of jobs that were not joined. At exit, an error aborts all ranks."""
    pending = list(runtime.get(_Writers).pending)
    failures = [failure for writer in pending if (failure := writer.join())]
    if failures:
        raise OSError('writing failed\n  ' + '\n  '.join(failures))
