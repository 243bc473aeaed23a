"""Locks: one job at a time writes the files of a name in a folder.

Each rank locks a file with ``flock``.  The kernel releases the lock when the process ends.  Who
releases the lock removes the file; the next job takes over the file of a killed process.
"""
from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from chainermn import _runtime
from chainermn._failures.exceptions import ChainerMNError

if TYPE_CHECKING:
    from chainermn.communicators.communicator_base import CommunicatorBase
    from chainermn.extensions._checkpointing.manifest import SaveNames

#: Seconds that a job waits for another one, whose ranks may still be exiting.
TIMEOUT = 15.

_POLL_INTERVAL = 0.1  # seconds


class _Locks(_runtime.Part):
    """The locks of this process."""

    def __init__(self) -> None:
        self.held: dict[str, FileLock] = {}  # by path
        self.mutex = threading.RLock()  # the garbage collector releases locks in any thread

    def in_child(self) -> bool:
        for lock in self.held.values():  # or a child that outlives this process keeps the lock
            os.close(lock.descriptor)
        return False


class InUseError(ChainerMNError):
    """Another process has the lock; the text names it."""


class FileLock:
    """A lock that this process has, for as many users as acquired it."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.users = 0
        self.descriptor = descriptor
        self._path = path

    def release(self) -> None:
        """Remove the file when the last user releases it.  Does nothing in a forked process."""
        locks = _runtime.get(_Locks)
        with locks.mutex:
            if locks.held.get(self._path) is not self:
                return
            self.users -= 1
            if self.users:
                return
            del locks.held[self._path]
            with contextlib.suppress(OSError):
                if _is_at(self._path, self.descriptor):
                    os.remove(self._path)
            os.close(self.descriptor)


def acquire(path: str, timeout: float) -> FileLock:
    """Lock a file.  A process that has the lock gets it again.

    Args:
        path: Path of the lock file; its folder must exist.
        timeout: Seconds to wait for another process that has the lock.

    Returns:
        The lock.

    Raises:
        InUseError: If another process has the lock.
        OSError: If the file cannot be created, or the file system cannot lock files.
    """
    folder, name = os.path.split(path)
    path = os.path.join(os.path.realpath(folder), name)
    end = time.monotonic() + timeout
    locks = _runtime.get(_Locks)
    while True:
        with locks.mutex:
            lock = locks.held.get(path) or _try(path, time.monotonic() >= end)
            if lock is not None:
                locks.held[path] = lock
                lock.users += 1
                return lock
        time.sleep(_POLL_INTERVAL)


def _try(path: str, is_last: bool) -> FileLock | None:
    """Lock the file; return ``None`` if it is in use and this is not the last attempt."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(path, descriptor):  # and was not removed in the meantime
            with contextlib.suppress(OSError):  # the disk is full: the file stays empty
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f'process {os.getpid()} on {os.uname().nodename} since '
                                     f'{time.strftime("%Y-%m-%d %H:%M:%S")}\n'.encode())
            return FileLock(path, descriptor)
    except BlockingIOError:
        if is_last:
            text = os.pread(descriptor, 200, 0).decode(errors='replace').strip()
            os.close(descriptor)
            raise InUseError(text if text and text.isprintable() else 'another process') from None
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _is_at(path: str, descriptor: int) -> bool:
    """Whether the open file is the one that has this path."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


class JobLock:
    """The locks of the files of one extension.  Released with this object at the latest.

    Args:
        comm: ChainerMN communicator.
        title: Name of the extension's files in errors.
        writers: The ranks that write files; rank 0 is the first.
        is_alone: Whether only rank 0 calls :meth:`acquire`, as no other rank writes.
    """

    def __init__(self, comm: CommunicatorBase, title: str, writers: Sequence[int], is_alone: bool
                 ) -> None:
        self.is_held = False
        self._comm = comm
        self._title = title
        self._writers = writers
        self._is_alone = is_alone
        self._release: Callable[[], object] = lambda: None

    def acquire(self, names: SaveNames, must_write: bool = False) -> None:
        """Lock the files with these names, and unlock those that were locked before.

        Also removes temporary files that a killed process of this rank left.
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
        mine = self._try(names) if rank == 0 else _LockAttempt()
        by_rank = [mine.texts]
        if not self._is_alone:
            # Rank 0 is first: of two jobs that start at the same time one gets all locks.
            if self._comm.bcast_obj(mine.texts.owner) is None and rank in self._writers[1:]:
                mine = self._try(names)
            by_rank = self._comm.allgather_obj(mine.texts)
        release_old, self._release = self._release, lambda: None
        if mine.lock is not None:
            self._release = weakref.finalize(self, mine.lock.release)
        release_old()
        self.is_held = True
        error: Exception | None = None
        if owners := _by_rank(texts.owner for texts in by_rank):
            error = RuntimeError(
                f'{self._title} is in use by another job\n  {owners[0]}\n'
                'Wait until that job has ended, or pass another name or folder.')
        elif must_write and (failures := _by_rank(texts.failure for texts in by_rank)):
            error = OSError(
                f'{self._title} cannot be saved: a folder is not writable\n  '
                + '\n  '.join(failures) + '\nPass another folder, or change its permissions.')
        if error is not None:
            self.release()
            if self._is_alone:
                self._comm.refuse('locking', error)
            raise error
        if (problems := _by_rank(texts.problem for texts in by_rank)) and rank == 0:
            warnings.warn(
                f'{self._title} is not locked: the file system cannot lock files\n'
                f'  {problems[0]}\n'
                'Make sure that no other job uses the same name and folder.',
                RuntimeWarning, stacklevel=4)

    def release(self) -> None:
        """Unlock the files of this rank."""
        self.is_held = False
        self._release()

    def _try(self, names: SaveNames) -> _LockAttempt:
        rank = self._comm.rank
        path = names.lock_path(rank)
        folder = os.path.dirname(path)
        try:
            os.makedirs(folder, exist_ok=True)
            lock = acquire(path, TIMEOUT)
        except InUseError as error:
            return _LockAttempt(texts=_Texts(owner=f'{path} is locked by {error}'))
        except OSError as error:
            if os.access(folder, os.W_OK):
                return _LockAttempt(texts=_Texts(problem=f'{path}: {error}'))
            # A job that cannot write does not disturb other jobs, and may load.
            return _LockAttempt(texts=_Texts(failure=f'{path}: {error}'))
        if lock.users == 1:
            for part in [*names.find_temporary(rank),
                         *(names.find_temporary(None) if rank == 0 else ())]:
                with contextlib.suppress(OSError):
                    os.remove(part)
        return _LockAttempt(lock)


class _Texts(NamedTuple):
    """Why a rank did not lock its files; all are ``None`` if it did."""

    owner: str | None = None  # another job, which has locked them
    problem: str | None = None  # the file system cannot lock files
    failure: str | None = None  # the folder is not writable


class _LockAttempt(NamedTuple):
    """The result of :meth:`JobLock._try`."""

    lock: FileLock | None = None
    texts: _Texts = _Texts()


def _by_rank(texts: Iterable[str | None]) -> list[str]:
    return [f'rank {rank}: {text}' for rank, text in enumerate(texts) if text is not None]
