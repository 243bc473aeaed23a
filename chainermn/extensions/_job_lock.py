"""One job at a time writes the files of a name in a folder: each rank locks its own files."""
from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from chainermn.extensions import _lock
from chainermn.extensions._commit import Names

#: Seconds that a job waits for another one, whose ranks may still be ending.
PATIENCE = 15.


class JobLock:
    """The locks of the files of one extension.  They end with this object, too.

    Args:
        comm: ChainerMN communicator.
        what: What is locked, for messages.
        writers: The ranks that write files; rank 0 is the first.
        is_alone: Whether only rank 0 calls :meth:`acquire`, as nobody else writes.
    """

    def __init__(self, comm: Any, what: str, writers: Sequence[int], is_alone: bool) -> None:
        self.is_held = False
        self._comm = comm
        self._what = what
        self._writers = writers
        self._is_alone = is_alone
        self._release: Callable[[], object] = lambda: None

    def acquire(self, names: Names) -> None:
        """Keeps other jobs from the files of these names, in place of those that it had.

        A rank removes files of its own that an earlier process was killed while writing.
        Collective: every rank calls it, unless rank 0 is alone.

        Raises:
            RuntimeError: On every rank, if another job uses these names in this folder.

        Warns:
            RuntimeWarning: On rank 0, if a file system cannot lock.
        """
        rank = self._comm.rank
        lock, owner, problem = self._try(names) if rank == 0 else (None, None, None)
        everyone = [(owner, problem)]
        if not self._is_alone:
            # Rank 0 is first: of two jobs that start at the same time one gets all locks.
            if self._comm.bcast_obj(owner) is None and rank in self._writers[1:]:
                lock, owner, problem = self._try(names)
            everyone = self._comm.allgather_obj((owner, problem))
        release_old, self._release = self._release, lambda: None
        if lock is not None:
            self._release = weakref.finalize(self, lock.release)
        release_old()
        self.is_held = True
        owners = [f'rank {rank}: {owner}' for rank, (owner, _) in enumerate(everyone) if owner]
        if owners:
            self.release()
            error = RuntimeError(
                f'{self._what} is in use by another job\n  {owners[0]}\n'
                'Wait until that job has ended, or pass another name or folder.')
            if self._is_alone:
                self._comm.refuse('locking', error)
            raise error
        problems = [f'rank {rank}: {text}' for rank, (_, text) in enumerate(everyone) if text]
        if problems and rank == 0:
            warnings.warn(
                f'{self._what} is not locked: the file system refused, and another job with the '
                f'same name and folder would go unnoticed\n  {problems[0]}',
                RuntimeWarning, stacklevel=4)

    def release(self) -> None:
        """Lets other jobs use the files of this rank."""
        self.is_held = False
        self._release()

    def _try(self, names: Names) -> tuple[_lock.Lock | None, str | None, str | None]:
        """Returns the lock of this rank's files, or who has it, or why there is none."""
        rank = self._comm.rank
        path = names.lock(rank)
        folder = os.path.dirname(path)
        try:
            os.makedirs(folder, exist_ok=True)
            lock = _lock.acquire(path, PATIENCE)
        except _lock.InUseError as error:
            return None, f'{path} is locked by {error}', None
        except OSError as error:
            # Where nothing can be written, no other job is disturbed, and saving says why.
            return None, None, f'{path}: {error}' if os.access(folder, os.W_OK) else None
        if lock.users == 1:
            for part in [*names.temporary.find(rank).values(),
                         *(names.temporary.find(None).values() if rank == 0 else ())]:
                with contextlib.suppress(OSError):
                    os.remove(part)
        return lock, None, None
