"""Locks the files of a name in a folder, so that only one job at a time writes them.

Each rank locks a file.
"""
from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from chainermn._operations.on_all_ranks import on_all_ranks
from chainermn._process.program_place import program_place
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions._checkpointing.lock import FileLock, InUseError, acquire
from chainermn.extensions._checkpointing.save_names import SaveNames

#: Seconds to wait for another job, whose ranks may still be exiting.
TIMEOUT = 15.


class _Obstacle(NamedTuple):
    """Why a rank did not lock its files; all are ``None`` if it did or if it writes no files."""

    owner: str | None = None  # the job that has locked them
    problem: str | None = None  # why the file system cannot lock files
    failure: str | None = None  # why the folder is not writable


class JobLock:
    """The file locks of one extension. They are released when this object is freed, or earlier.

    Args:
        comm: ChainerMN communicator.
        title: Name of the extension's files in error messages.
        writers: The ranks that write files; rank 0 is the first.
        is_alone: Whether only rank 0 calls :meth:`acquire`, because no other rank writes files.
    """

    def __init__(self, comm: CommunicatorBase, title: str, writers: Sequence[int], is_alone: bool
                 ) -> None:
        self.is_held = False
        self._comm = comm
        self._title = title
        self._writers = writers
        self._is_alone = is_alone
        self._release: Callable[[], object] = lambda: None
        self._finalizer: weakref.finalize[[], JobLock] | None = None

    def acquire(self, names: SaveNames, must_write: bool = False) -> None:
        """Lock the files with these names; unlock the files that were locked until now.

        Also remove temporary files that a killed process of this rank has left. Rank 0 also removes
        the temporary files and locks of ranks that this job does not have.

        Collective: every rank calls it, unless rank 0 is alone.

        Args:
            names: Names of the files.
            must_write: Whether a folder that is not writable is an error.

        Raises:
            OSError: On every rank, with ``must_write``, if any rank cannot write to its folder.
            RuntimeError: On every rank, if another job uses these names in this folder.

        Warns:
            RuntimeWarning: On rank 0, if a file system cannot lock files.
        """
        rank = self._comm.rank
        lock, obstacle = _try(names, rank) if rank == 0 else (None, _Obstacle())
        if lock is not None and lock.users == 1:
            _clean_up(names, self._writers)
        # Rank 0 is first, so that one of two jobs that start at the same time gets all locks.
        if not self._is_alone and not self._comm.bcast_obj(obstacle.owner) and (
                rank in self._writers[1:]):
            lock, obstacle = _try(names, rank)
        release_old, self._release = self._release, lambda: None
        if lock is not None:
            self._release = self._finalizer = weakref.finalize(self, lock.release)
        release_old()
        obstacles = [obstacle] if self._is_alone else self._comm.allgather_obj(obstacle)
        self.is_held = True
        if owners := _by_rank(each.owner for each in obstacles):
            self._raise(RuntimeError(
                f'{self._title} is in use by another job\n  {owners[0]}\n'
                'Wait until that job has finished, or pass a different name or folder.'))
        if must_write and (failures := _by_rank(each.failure for each in obstacles)):
            self._raise(OSError(
                f'{self._title} cannot be saved: a folder is not writable\n  '
                + '\n  '.join(failures) + '\nPass a different folder, or change its permissions.'))
        if rank == 0 and (problems := _by_rank(each.problem for each in obstacles)):
            warnings.warn_explicit(
                f'{self._title} is not locked: the file system cannot lock files\n'
                f'  {problems[0]}\n'
                'Make sure that no other job uses the same name and folder.',
                RuntimeWarning, *program_place())

    def keep_until_released(self) -> None:
        """Do not unlock the files when this object is freed or the interpreter exits."""
        if self._finalizer is not None and (detached := self._finalizer.detach()) is not None:
            self._release = detached[1]

    def release(self) -> None:
        """Unlock the files of this rank."""
        self.is_held = False
        self._release()

    def _raise(self, error: Exception) -> None:
        self.release()
        if self._is_alone:
            self._comm.refuse('locking', error)
        raise on_all_ranks(self._comm, error)


def _try(names: SaveNames, rank: int) -> tuple[FileLock | None, _Obstacle]:
    path = names.lock_path(rank)
    folder = os.path.dirname(path)
    try:
        os.makedirs(folder, exist_ok=True)
        lock = acquire(path, TIMEOUT)
    except InUseError as error:
        return None, _Obstacle(owner=f'{path} is locked by {error}')
    except OSError as error:
        if os.access(folder, os.W_OK):
            return None, _Obstacle(problem=f'{path}: {error}')
        # A job that cannot write does not disturb other jobs, so it may still load files.
        return None, _Obstacle(failure=f'{path}: {error}')
    if lock.users == 1:
        _remove_temporary(names, rank)
    return lock, _Obstacle()


def _clean_up(names: SaveNames, writers: Sequence[int]) -> None:
    """Remove temporary files and locks of ranks that are not writers, unless they are running."""
    for rank, path in names.find_locks().items():
        if rank not in writers:
            with contextlib.suppress(InUseError, OSError):
                lock = acquire(path, timeout=0)
                _remove_temporary(names, rank)
                lock.release()


def _remove_temporary(names: SaveNames, rank: int) -> None:
    for part in names.find_temporary(rank):
        with contextlib.suppress(OSError):
            os.remove(part)


def _by_rank(texts: Iterable[str | None]) -> list[str]:
    return [f'rank {rank}: {text}' for rank, text in enumerate(texts) if text is not None]
