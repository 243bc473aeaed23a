"""What this rank tells ``top`` and the metrics: a sample per second, while somebody watches.

A rank with viewers asks the watchdogs of the other ranks for samples, again and again: they stop a
few seconds after the last question.  So a viewer that is killed needs no farewell.
"""
from __future__ import annotations

import json
import os
import pathlib
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from chainermn._process import launcher
from chainermn._process.mpi import MPI
from chainermn._timeline import activities

#: Seconds between two samples; with many ranks, it is longer.
_INTERVAL = 1.
_RANKS_PER_SECOND = 128

#: A rank sends samples for this number of seconds after a question.
LEASE = 6.
_RENEWAL = 2.

#: The version of the samples, for ``top`` of another version.
VERSION = 1


class Watch(NamedTuple):
    """A question: send samples for a while."""

    interval: float


class Sample(NamedTuple):
    """The state of a rank.  Numbers are totals: a viewer takes the difference of two samples."""

    rank: int
    host: str
    pid: int
    job: str
    at: float  # seconds, of a clock that all samples of this rank use
    updates: int | None  # of the optimizer with most; None without an optimizer
    operations: int
    seconds: Mapping[str, float]  # by activity
    rss_bytes: int
    gpu_bytes: int
    state: str  # in words
    is_waiting: bool  # whether the main thread is in an operation
    state_seconds: float  # for how long it has been in this state; 0 if it makes progress


class Viewer(Protocol):
    """Gets the samples of all ranks, or of those on one host."""

    is_open: bool
    host: str  # '' for all

    def write(self, size: int, samples: Iterable[tuple[float, Sample]]) -> None:
        """Take the newest sample of each rank, with its age in seconds."""

    def close(self) -> None:
        """Note that the program has ended."""


class LiveView:
    """The viewers of this rank, and the ranks that ask it for samples."""

    def __init__(self) -> None:
        self.viewers: list[Viewer] = []
        self._samples: dict[int, tuple[float, Sample]] = {}  # by rank, with its time of arrival
        self._asking: dict[int, tuple[float, float]] = {}  # by rank: until when, interval
        self._sent_at: dict[int, float] = {}
        self._asked_at = self._written_at = 0.

    @property
    def is_watched(self) -> bool:
        """Whether samples are needed."""
        return bool(self.viewers or self._asking)

    def due(self, n_ranks: int, now: float) -> tuple[list[int], Watch | None]:
        """Return which ranks need a sample of this one now, and a question, if it is time to ask.

        Args:
            n_ranks: The number of ranks of the group.
            now: The current time.
        """
        self.viewers = [viewer for viewer in self.viewers if viewer.is_open]
        self._asking = {rank: each for rank, each in self._asking.items() if each[0] > now}
        if not self.is_watched:
            activities.stop()
            return [], None
        activities.start()
        due = [rank for rank, (_, interval) in self._asking.items()
               if now >= self._sent_at.get(rank, 0) + interval]
        self._sent_at.update(dict.fromkeys(due, now))
        watch = None
        if self.viewers and now >= self._asked_at + _RENEWAL:
            self._asked_at = now
            watch = Watch(max(_INTERVAL, n_ranks / _RANKS_PER_SECOND))
        return due, watch

    def asked(self, hosts: Sequence[str]) -> list[int]:
        """Return the ranks of the group that the viewers want to see.

        Args:
            hosts: The host of each rank.
        """
        wanted = {viewer.host for viewer in self.viewers}
        return [rank for rank, host in enumerate(hosts) if '' in wanted or host in wanted]

    def ask(self, source: int, watch: Watch, now: float) -> None:
        """Send samples to a rank for a while."""
        self._asking[source] = now + LEASE, watch.interval

    def add(self, sample: Sample, now: float) -> None:
        """Keep the sample of a rank."""
        self._samples[sample.rank] = now, sample

    def write(self, n_ranks: int, now: float) -> None:
        """Give the newest samples to the viewers, once per interval."""
        if self.viewers and now >= self._written_at + _INTERVAL - .05:
            self._written_at = now
            for viewer in self.viewers:
                viewer.write(n_ranks, [(now - at, sample) for _, (at, sample) in
                                       sorted(self._samples.items())
                                       if viewer.host in ('', sample.host)])

    def close(self) -> None:
        """Note that the program has ended."""
        for viewer in self.viewers:
            viewer.close()
        self.viewers = []


class TopViewer:
    """The connection to a ``top`` command of this host, as one line of JSON per interval.

    Args:
        name: The name of its socket.
        rank: This rank, in COMM_WORLD.

    Raises:
        OSError: If the command has ended, or belongs to another user.
    """

    host = ''

    def __init__(self, name: str, rank: int) -> None:
        self._rank, self.is_open = rank, True
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.setblocking(False)
            self._socket.connect('\0chainermn-top-' + name)
            if launcher.peer(self._socket)[1] != os.getuid():
                raise PermissionError('another user listens there')
        except OSError:
            self._socket.close()
            raise

    def write(self, size: int, samples: Iterable[tuple[float, Sample]]) -> None:
        """Send samples."""
        self._send({'version': VERSION, 'rank': self._rank, 'size': size, 'samples': [
            {**sample._asdict(), 'age': age} for age, sample in samples]})

    def close(self) -> None:
        """Tell the command that the program has ended."""
        self._send({'version': VERSION, 'end': 'finished'})
        self._socket.close()

    def _send(self, content: Mapping[str, object]) -> None:
        data = json.dumps(content).encode() + b'\n'
        try:
            if self.is_open and self._socket.send(data) == len(data):
                return
        except OSError:  # it has ended, or does not read
            pass
        self.is_open = False
        self._socket.close()


def sample(rank: int, operations: int, state: str, is_waiting: bool, state_seconds: float
           ) -> Sample:
    """Return a sample of this rank."""
    recorded = activities.start()
    return Sample(rank, MPI.Get_processor_name(), os.getpid(), job_name(), time.monotonic(),
                  activities.updates(), operations, recorded.totals(), _rss_bytes(),
                  recorded.gpu_bytes, state, is_waiting, state_seconds)


def job_name() -> str:
    """Return the job ID of Slurm, or the file name of the program."""
    return os.environ.get('SLURM_JOB_ID') or os.path.basename(sys.argv[0]) or 'python'


def _rss_bytes() -> int:
    try:
        pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
        return pages * os.sysconf('SC_PAGE_SIZE')
    except (OSError, ValueError, IndexError):
        return 0

