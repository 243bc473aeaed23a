"""A lock file of a process.  The kernel releases it when the process ends, whatever ends it.

It is removed when it is released.  One that a killed process left is free, and taken over.
"""
from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time

_EVERY = 0.1  # seconds between two attempts

_held: dict[str, Lock] = {}  # of this process, by path
_mutex = threading.RLock()  # the garbage collector releases locks in any thread


class InUseError(Exception):
    """Another process has the lock; the text says which."""


class Lock:
    """A lock that this process has, for as many users as acquired it."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.users = 0
        self.descriptor = descriptor
        self._path = path

    def release(self) -> None:
        """Removes the file when the last user releases it.  Does nothing in a forked process."""
        with _mutex:
            if _held.get(self._path) is not self:
                return
            self.users -= 1
            if self.users:
                return
            del _held[self._path]
            with contextlib.suppress(OSError):
                if _is_at(self._path, self.descriptor):
                    os.remove(self._path)
            os.close(self.descriptor)


def acquire(path: str, patience: float) -> Lock:
    """Locks a file.  A process that has it gets it again.

    Args:
        path: The lock file; its folder has to be there.
        patience: Seconds to wait for another process that has it.

    Raises:
        InUseError: If another process has it.
        OSError: If the file cannot be made, or the file system cannot lock.
    """
    folder, name = os.path.split(path)
    path = os.path.join(os.path.realpath(folder), name)
    end = time.monotonic() + patience
    while True:
        with _mutex:
            lock = _held.get(path) or _try(path, time.monotonic() >= end)
            if lock is not None:
                _held[path] = lock
                lock.users += 1
                return lock
        time.sleep(_EVERY)


def _try(path: str, is_last: bool) -> Lock | None:
    """Locks the file; returns ``None`` if another attempt is due."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(path, descriptor):  # and was not removed meanwhile
            with contextlib.suppress(OSError):  # the disk is full: there is just no text
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f'process {os.getpid()} on {os.uname().nodename} since '
                                     f'{time.strftime("%Y-%m-%d %H:%M:%S")}\n'.encode())
            return Lock(path, descriptor)
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


def _forget() -> None:
    """Leaves all locks to the process that this one was forked from."""
    global _mutex
    _mutex = threading.RLock()
    for lock in _held.values():
        os.close(lock.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)  # or a child that outlives this process keeps it
