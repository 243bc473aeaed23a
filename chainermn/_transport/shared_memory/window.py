"""Shared memory of the ranks of one node, with counters for synchronization.

Each rank counts its steps in its own segment and polls the counters of the others. A waiting rank
polls briefly, then yields its core, then sleeps between polls: with fewer cores than ranks, the
other rank may need this core. If a rank fails or its process ends, the others raise an error that
identifies the failed rank, within about a second.
"""
from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from chainermn._operations.ranks import group_ranks, ranks_text
from chainermn._process.mpi import MPI

_PAGE = 4096  # bytes before the data of each segment, for the counter

_POLLS = 100  # polls without yielding; about 5 microseconds
_YIELDS = 100  # polls with a sched_yield before each; about 100 microseconds
_POLL_INTERVAL = 1e-6  # seconds between later polls; about 60 microseconds with the kernel's delay
_CHECK = 2048  # polls between two checks for failed ranks; about 0.2 seconds


class Window:
    """A shared memory segment and a counter for each rank of a node.

    Collective: every rank of the node creates one.

    Args:
        mpi_comm: Communicator of the ranks of the node; nothing else may use it.
        size: Size of this rank's segment in bytes.
        name: Name of this rank in error messages.
        detects_ends: Whether to raise an error if the process of another rank has exited.

    Raises:
        MPI.Exception: If no shared memory is available. MPI libraries raise it on all ranks.

    Attributes:
        segments: The segments of all ranks, as arrays of bytes. The rank that uses a page most
            should write to it first, so that the page is near its core.
        published: A view whose first element is the counter of this rank.
        is_passive: Whether to sleep after every poll, because this process has other work to do.
    """

    is_passive = False

    def __init__(self, mpi_comm: MPI.Intracomm, size: int, name: str, detects_ends: bool = True
                 ) -> None:
        # If MPICH has no communicators left, Allocate_shared crashes, but Dup raises an error.
        mpi_comm.Dup().Free()
        info = MPI.Info.Create({'alloc_shared_noncontig': 'true',
                                'mpi_minimum_memory_alignment': str(_PAGE)})
        self._window = MPI.Win.Allocate_shared(_PAGE + size, 1, info, mpi_comm)
        info.Free()
        self._window.Lock_all(MPI.MODE_NOCHECK)  # required for Sync
        self._mpi_comm = mpi_comm
        self._detects_ends = detects_ends
        memory = [self._window.Shared_query(rank)[0].cast('B') for rank in range(mpi_comm.size)]
        complete = [np.frombuffer(segment, np.uint8) for segment in memory]
        # Each rank has two words: its counter, and 0 or 1 + the rank whose failure it has noticed.
        words = [segment[:16].data.cast('q') for segment in complete]
        self._mine = words[mpi_comm.rank]
        self._mine[0] = self._mine[1] = 0
        self.published = self._mine
        responses = mpi_comm.allgather((size, name, _Process.this()))
        self._processes = [(name, process) for _, name, process in responses]
        # A segment may be longer than requested.
        self.segments = [segment[_PAGE:_PAGE + length]
                         for segment, (length, _, _) in zip(complete, responses, strict=True)]
        self._others = {rank: words[rank] for rank in range(mpi_comm.size)
                        if rank != mpi_comm.rank}

    def publish(self, count: int) -> None:
        """Set this rank's counter after all of its previous writes."""
        self._window.Sync()
        self._mine[0] = count

    def wait(self, count: int) -> None:
        """Wait until the counters of all other ranks are ``count`` or more.

        Raises:
            RuntimeError: If one of them failed or exited.
        """
        for words in self._others.values():
            polls = 0
            while words[0] < count:
                polls += 1
                if polls > _POLLS or self.is_passive:
                    self._idle(polls)
        self._window.Sync()

    def fail(self) -> None:
        """Make all ranks that wait for this one raise an error."""
        if not self._mine[1]:
            self._mine[1] = 1 + self._mpi_comm.rank

    def free(self) -> None:
        """Free the memory; the segments must not be used afterwards.

        Collective: every rank calls it.
        """
        self.segments, self._others = [], {}
        del self._mine, self.published
        self._window.Unlock_all()
        self._window.Free()

    def _idle(self, polls: int) -> None:
        if polls <= _POLLS + _YIELDS and not self.is_passive:
            os.sched_yield()
            return
        time.sleep(_POLL_INTERVAL)
        # Let MPI make progress with messages that this rank has sent.
        self._mpi_comm.Iprobe()
        if polls % _CHECK == 0 and self._detects_ends:
            self._check()

    def _check(self) -> None:
        for rank, words in self._others.items():
            failed = words[1]  # read only once, because it may change at any time
            first = failed - 1 if failed else rank
            name, process = self._processes[first]
            is_alive = process.is_alive()
            if failed or not is_alive:
                self._mine[1] = 1 + first
                raise RuntimeError(f'{name} (process {process.pid} on {os.uname().nodename}) '
                                   f'{"failed" if is_alive else "exited"} during an operation')


def check_space(size: int) -> None:
    """Raise an error if ``/dev/shm`` has too little space for the windows of a node.

    Without this check, the first write to a window would kill the process. Also, some MPI libraries
    do not raise an error on the other ranks if allocation fails on one of them. The check does not
    write to the memory, because the other ranks of the node are waiting for this one.
    """
    if os.path.isdir('/dev/shm'):
        with tempfile.TemporaryFile(dir='/dev/shm') as file:
            os.ftruncate(file.fileno(), size)  # raises if this process may not create such files
            space = os.fstatvfs(file.fileno())
        free = space.f_bavail * space.f_frsize
        if space.f_blocks and free < size:  # f_blocks is 0 if there is no limit
            raise OSError(errno.ENOSPC,
                          f'/dev/shm has {free:,} bytes left, but {size:,} are needed')


def failures(mpi_comm: MPI.Comm, attempt: Callable[[], object]) -> str:
    """Call a function on all ranks; return a text with the errors of all ranks, on every rank."""
    failure = ''
    try:
        attempt()
    except Exception as error:
        failure = (error.Get_error_string() if isinstance(error, MPI.Exception) else str(error)
                   ) or type(error).__name__
    # There is almost never an error, and this finds that out in less time than `allgather`.
    has_failed = np.array([bool(failure)])
    mpi_comm.Allreduce(MPI.IN_PLACE, has_failed, MPI.LOR)
    if not has_failed[0]:
        return ''
    groups = group_ranks(enumerate(mpi_comm.allgather(failure)))
    return '; '.join(f'{ranks_text(ranks)} ({text})' for text, ranks in groups.items() if text)


class _Process(NamedTuple):
    """A process of this node, with its start time because PIDs are reused."""

    pid: int
    start: str
    namespace: str

    @classmethod
    def this(cls) -> _Process:
        try:
            return cls(os.getpid(), _stat('self')[1], os.readlink('/proc/self/ns/pid'))
        except OSError:  # not Linux, or /proc is hidden
            return cls(os.getpid(), '', '')

    def is_alive(self) -> bool:
        """Return whether the process is running; ``True`` if that is unknown."""
        with contextlib.suppress(OSError):
            if not self.start or self.namespace != os.readlink('/proc/self/ns/pid'):
                return True
            state, start = _stat(str(self.pid))
            return state not in 'ZX' and start == self.start
        return not self.start


def _stat(pid: str) -> tuple[str, str]:
    """Return the state and start time of a process."""
    with open(f'/proc/{pid}/stat', encoding='ascii', errors='replace') as file:
        words = file.read().rpartition(')')[2].split()
    return words[0], words[19]
