"""Memory that the ranks of one node share, and the counters by which they wait for one another.

Each rank counts its steps in its own segment and looks at the counters of the others.  A rank
that waits looks for a moment, then offers its core to others, then sleeps between two looks:
where cores are short, the rank that it waits for may need this one.  A rank that fails, or whose
process ends, is noticed within a second or so, and named.
"""
from __future__ import annotations

import contextlib
import os
import time
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

_PAGE = 4096  # of which each segment has one ahead of its data, for the counter

_POLLS = 100  # how often to look at once; about 5 microseconds
_YIELDS = 100  # how often to look after each sched_yield; about 100 microseconds
_NAP = 1e-6  # seconds to sleep between later looks; the kernel makes it about 60 microseconds
_CHECK = 2048  # looks from one check of the others to the next; about 0.2 seconds


class Window:
    """A segment of memory for each rank of a node, and a counter.

    Collective: every rank of the node makes one.

    Args:
        mpi_comm: Communicator of the ranks of the node, for the window alone.
        size: Bytes of this rank's segment.
        name: What to call this rank in errors.

    Raises:
        MPI.Exception: If there is no such memory.  MPI libraries raise it on all ranks.

    Attributes:
        segments: The segments of all ranks, as arrays of bytes; a rank should be the first to
            write to what it uses most, so that it lies near its core.
        is_patient: Whether to sleep between any two looks, since this process has other work.
    """

    is_patient = False

    def __init__(self, mpi_comm: Any, size: int, name: str) -> None:
        info = MPI.Info.Create({'alloc_shared_noncontig': 'true',
                                'mpi_minimum_memory_alignment': str(_PAGE)})
        self._window = MPI.Win.Allocate_shared(_PAGE + size, 1, info, mpi_comm)
        info.Free()
        self._window.Lock_all(MPI.MODE_NOCHECK)  # without it there is no Sync
        self._mpi_comm = mpi_comm
        memory: list[Any] = [self._window.Shared_query(rank)[0] for rank in range(mpi_comm.size)]
        whole = [np.frombuffer(segment, np.uint8) for segment in memory]
        # Of each rank: its counter; and 0, or 1 + the rank for whose failure it failed.
        words = [segment[:16].data.cast('q') for segment in whole]
        self._mine = words[mpi_comm.rank]
        self._mine[0] = self._mine[1] = 0
        said = mpi_comm.allgather((size, name, _Process.this()))
        self._processes = [(name, process) for _, name, process in said]
        # A segment may be longer than asked for.
        self.segments = [segment[_PAGE:_PAGE + length]
                         for segment, (length, _, _) in zip(whole, said, strict=True)]
        self._others = {rank: words[rank] for rank in range(mpi_comm.size)
                        if rank != mpi_comm.rank}

    def publish(self, count: int) -> None:
        """Sets this rank's counter, after all that it wrote."""
        self._window.Sync()
        self._mine[0] = count

    def wait(self, count: int) -> None:
        """Waits until the counters of all other ranks are ``count`` or more.

        Raises:
            RuntimeError: If one of them failed or ended.
        """
        for words in self._others.values():
            looks = 0
            while words[0] < count:
                looks += 1
                if looks > _POLLS or self.is_patient:
                    self._idle(looks)
        self._window.Sync()

    def fail(self) -> None:
        """Lets all ranks that wait for this one raise an error."""
        if not self._mine[1]:
            self._mine[1] = 1 + self._mpi_comm.rank

    def free(self) -> None:
        """Frees the memory; the segments must not be touched any more.  Collective."""
        self.segments, self._others = [], {}
        del self._mine
        self._window.Unlock_all()
        self._window.Free()

    def _idle(self, looks: int) -> None:
        if looks <= _POLLS + _YIELDS and not self.is_patient:
            os.sched_yield()
            return
        time.sleep(_NAP)
        # MPI makes progress with what other ranks still have to receive from this one.
        self._mpi_comm.Iprobe()
        if looks % _CHECK == 0:
            self._check()

    def _check(self) -> None:
        for rank, words in self._others.items():
            said = words[1]  # once: it may change meanwhile
            first = said - 1 if said else rank
            name, process = self._processes[first]
            is_alive = process.is_alive()
            if said or not is_alive:
                self._mine[1] = 1 + first
                raise RuntimeError(f'{name} (process {process.pid} on {os.uname().nodename}) '
                                   f'{"failed" if is_alive else "ended"} in the middle of an '
                                   'exchange')


class _Process(NamedTuple):
    """A process of this machine; the time of its start tells it from a later one."""

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
        """Whether it runs; true where that cannot be known."""
        with contextlib.suppress(OSError):
            if not self.start or self.namespace != os.readlink('/proc/self/ns/pid'):
                return True
            state, start = _stat(str(self.pid))
            return state not in 'ZX' and start == self.start
        return not self.start


def _stat(pid: str) -> tuple[str, str]:
    """State and start of a process."""
    with open(f'/proc/{pid}/stat', encoding='ascii', errors='replace') as file:
        words = file.read().rpartition(')')[2].split()
    return words[0], words[19]
