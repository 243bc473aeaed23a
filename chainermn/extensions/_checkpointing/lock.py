"""File locks between processes, with ``flock``.

The kernel releases a lock when its process exits. A process that releases a lock itself removes the
file. If a process was killed, the next process takes over its file.
"""
from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time

from chainermn._operations.exceptions import ChainerMNError
from chainermn._process import runtime
from chainermn._process.running_time import RunningClock

_POLL_INTERVAL = 0.1  # seconds


class _Locks(runtime.ProcessState):
    """The locks of this process."""

    def __init__(self) -> None:
        self.held: dict[str, FileLock] = {}  # by path
        self.mutex = threading.RLock()  # the garbage collector releases locks in any thread

    def in_child(self) -> bool:
        # Otherwise, a child that outlives this process would keep the locks.
        for lock in self.held.values():
            os.close(lock.descriptor)
        return False


class InUseError(ChainerMNError):
    """Another process has the lock; the text shows which one."""


class FileLock:
    """A lock that this process holds, with the number of its users."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.users = 0
        self.descriptor = descriptor
        self._path = path

    def release(self) -> None:
        """Remove the file when the last user releases it. Does nothing in a forked process."""
        locks = runtime.get(_Locks)
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
    """Lock a file. A process that already has the lock gets the same lock again.

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
    clock = RunningClock()
    end = clock.poll() + timeout
    locks = runtime.get(_Locks)
    while True:
        with locks.mutex:
            lock = locks.held.get(path) or _try(path, clock.poll() >= end)
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
        if _is_at(path, descriptor):  # otherwise, the file was removed in the meantime
            with contextlib.suppress(OSError):  # if the disk is full, the file stays empty
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
    """Return whether an open file is the file at this path."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
