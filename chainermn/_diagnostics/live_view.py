"""Samples of the ranks for ``top`` and the metrics: one sample of each rank per second.

When a program on the same host asks a rank for samples, this rank repeatedly asks the watchdogs of
the other ranks. A rank that has not been asked for a few seconds stops recording, so a viewer may
exit or be killed without notice.
"""
from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from chainermn._process import launcher, nvml
from chainermn._process.mpi import MPI
from chainermn._process.nvml import GpuUse
from chainermn._timeline import activities, reported

#: Seconds between two requests for samples; longer if there are many ranks.
_INTERVAL = 1.
_RANKS_PER_SECOND = 128

#: A rank records its activities for this number of seconds after a request.
_LEASE = 6.

_CLOSE_TIMEOUT = 1.  # seconds


class Sample(NamedTuple):
    """The state of a rank. Numbers are totals; a viewer computes differences between samples."""

    rank: int
    host: str
    pid: int
    at: float  # seconds on a clock that all samples of this rank use
    updates: int | None  # the largest number of updates of an optimizer; None without optimizers
    operations: int
    seconds: Mapping[str, float]  # by activity
    cpu_seconds: float  # CPU time of all threads of the process
    rss_bytes: int
    gpu_bytes: int  # size of CuPy's pool
    gpu: GpuUse | None  # use of the current device by all processes
    log: Mapping[str, float]  # the newest entry of LogReport
    state: str  # as text
    is_waiting: bool  # whether the main thread is in an operation
    state_seconds: float  # time in this state; 0 if the rank makes progress


class Viewer:
    """A program on this host that gets the samples. It may stop reading; the rank never waits.

    Args:
        connection: The socket to the viewer.
        encode: Function that returns the message for the number of ranks and the newest sample of
            each rank, with its age in seconds. The number of ranks is 0 when the job has finished.
        is_local: Whether the viewer needs only the ranks on this host.
    """

    def __init__(self, connection: socket.socket,
                 encode: Callable[[int, Sequence[tuple[float, Sample]]], bytes],
                 is_local: bool) -> None:
        connection.setblocking(False)
        self._socket, self._encode = connection, encode
        self._rest = b''  # the incomplete last message
        self.is_local, self.is_open = is_local, True

    def write(self, size: int, samples: Sequence[tuple[float, Sample]]) -> None:
        """Send samples, unless the viewer has not yet read the previous ones."""
        if not self._rest:
            self._rest = self._encode(size, samples)
        self.flush()

    def flush(self) -> None:
        """Send the rest of the last message, as far as possible without waiting."""
        try:
            while self._rest:
                # User code may have restored SIGPIPE, which would kill this process.
                self._rest = self._rest[self._socket.send(self._rest, socket.MSG_NOSIGNAL):]
        except BlockingIOError:
            pass
        except OSError:  # the viewer has exited
            self.abandon()

    def close(self) -> None:
        """Notify the viewer that the job has finished."""
        with contextlib.suppress(OSError):
            self._socket.settimeout(_CLOSE_TIMEOUT)
            self._socket.sendall(self._rest + self._encode(0, ()), socket.MSG_NOSIGNAL)
        self.abandon()

    def abandon(self) -> None:
        """Close the connection."""
        self.is_open = False
        self._socket.close()


class LiveView:
    """The viewers of this rank, and the newest samples."""

    def __init__(self) -> None:
        self.viewers: list[Viewer] = []
        self._samples: dict[int, tuple[float, Sample]] = {}  # by rank, with the times of arrival
        self._asked_at = self._shown_at = -_LEASE
        self._is_recording = False
        # These are constant, and not every thread may call MPI.
        self._rank, self._host = MPI.COMM_WORLD.rank, MPI.Get_processor_name()

    def is_watched(self, now: float) -> bool:
        """Return whether there are viewers; otherwise nothing is recorded."""
        return bool(self.viewers) or now < self._asked_at + _LEASE

    def poll(self, now: float) -> None:
        """Remove viewers that have exited, and record activities while there are viewers."""
        for viewer in self.viewers:
            viewer.flush()
        self.viewers = [viewer for viewer in self.viewers if viewer.is_open]
        is_watched = self.is_watched(now)
        if is_watched and not self._is_recording:
            activities.start()
        elif self._is_recording and not is_watched:
            activities.stop()
        self._is_recording = is_watched

    def note_question(self, now: float) -> None:
        """Record that another rank has asked for a sample."""
        self._asked_at = now

    def is_due(self, n_ranks: int, now: float) -> bool:
        """Return whether it is time to show samples and to ask for new ones."""
        interval = max(_INTERVAL, n_ranks / _RANKS_PER_SECOND) - .05
        if not self.viewers or now < self._shown_at + interval:
            return False
        self._shown_at = now
        return True

    def sample(self, operations: int, state: str, is_waiting: bool, state_seconds: float
               ) -> Sample:
        """Return a sample of this rank."""
        recorded = activities.start()
        return Sample(self._rank, self._host, os.getpid(), time.monotonic(), activities.updates(),
                      operations, recorded.totals(), time.process_time(), _rss_bytes(),
                      recorded.gpu_bytes, nvml.gpu_use(recorded.gpu), reported.newest(), state,
                      is_waiting, state_seconds)

    def add(self, sample: Sample, now: float) -> None:
        """Keep the sample of a rank."""
        self._samples[sample.rank] = now, sample

    def write(self, n_ranks: int, now: float) -> None:
        """Send the newest samples to the viewers."""
        for viewer in self.viewers:
            viewer.write(n_ranks, [
                (now - at, sample) for _, (at, sample) in sorted(self._samples.items())
                if sample.host == self._host or not viewer.is_local])

    def needed(self, hosts: Sequence[str], rank: int) -> list[int]:
        """Return the other ranks that the viewers show.

        Args:
            hosts: The host of each rank.
            rank: This rank.
        """
        is_local = all(viewer.is_local for viewer in self.viewers)
        return [other for other, host in enumerate(hosts)
                if other != rank and (host == hosts[rank] or not is_local)]

    def close(self) -> None:
        """Notify the viewers that the job has finished."""
        for viewer in self.viewers:
            viewer.close()
        self.viewers = []


def connect(name: str) -> Viewer:
    """Connect to a ``top`` command on this host, which gets one line of JSON per interval.

    Args:
        name: The name of the command's socket.

    Raises:
        OSError: If the command has exited or belongs to another user.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)
        connection.connect('\0chainermn-top-' + name)
        if launcher.peer(connection)[1] != os.getuid():
            raise PermissionError('the socket belongs to another user')
    except OSError:
        connection.close()
        raise
    return Viewer(connection, _line, is_local=False)


def _line(size: int, samples: Sequence[tuple[float, Sample]]) -> bytes:
    return json.dumps({'size': size, 'samples': [
        {**sample._asdict(), 'age': age} for age, sample in samples]}).encode() + b'\n'


def _rss_bytes() -> int:
    try:
        pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
        return pages * os.sysconf('SC_PAGE_SIZE')
    except (OSError, ValueError, IndexError):
        return 0
