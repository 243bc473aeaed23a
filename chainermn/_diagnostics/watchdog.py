"""The watchdog: a thread of each rank that detects hangs, so that no rank waits forever.

It polls about once per second whether its rank makes progress.  It raises an alarm if the rank has
been in one operation for longer than the timeout, or waits for a message of finished ranks.  Then
the watchdog of each rank responds with the state of its rank, the lowest rank that responds prints
the report, and the job is aborted.

The watchdogs exchange messages on their own communicators.  This requires MPI_THREAD_MULTIPLE;
without it, each rank only reports its own state.
"""
from __future__ import annotations

import math
import os
import pickle
import threading
import time
import traceback
import weakref
from collections.abc import Collection, Iterable
from typing import Protocol, TypeAlias

from mpi4py import MPI

from chainermn import _environment, _streams, global_except_hook
from chainermn._diagnostics import hang_report, rank_progress, thread_state
from chainermn._diagnostics.flight_recorder import world_ranks
from chainermn._diagnostics.hang_report import Response
from chainermn._diagnostics.rank_progress import Progress
from chainermn._diagnostics.thread_state import Snapshot
from chainermn._ranks import ranks_text
from chainermn._tracing import recorder

VARIABLE = _environment.TIMEOUT

#: The timeout per operation in seconds, unless the environment or the communicator sets one: long
#: enough for typical work of one rank while the others wait, such as preparing a data set.
DEFAULT_TIMEOUT = 3600.

# Tags.
_ALARM, _RESPONSE, _FINISHED = 1, 2, 3

# Seconds.
_INTERVAL = 1.
_INTERVAL_ALARMED = .02
_RESPONSE_TIMEOUT = 2.5  # longer than the interval, since the others have to wake up
_REPORT_TIMEOUT = 2.  # then the next rank reports, in case the previous one has stopped
_GRACE = 2.  # for a message that a rank sent just before it finished

#: The watchdog stops after this number of consecutive errors.
_MAX_ERRORS = 3

#: The maximum number of ranks that may report.
_MAX_REPORTERS = 16

#: The content of a message, by tag: none, a response, or the progress of a finished rank.
_Content: TypeAlias = Response | Progress | None
_Snapshots: TypeAlias = dict[int, Snapshot]  # by thread


def parse_timeout(value: object, name: str = 'a timeout') -> float:
    """Returns a timeout in seconds, 0 for none.

    Raises:
        TypeError, ValueError: If the value is invalid.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f'{name} has to be a number of seconds, not {value!r}')
    try:
        timeout = float(value)
    except ValueError:
        timeout = math.nan
    if not 0 <= timeout < math.inf:
        raise ValueError(f'{name} has to be a number of seconds, 0 for none, not {value!r}')
    return timeout


class _Group:
    """The ranks of a communicator, and the messages of their watchdogs."""

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        can_send = MPI.Query_thread() >= MPI.THREAD_MULTIPLE and mpi_comm.size > 1
        self.mpi_comm = mpi_comm.Dup() if can_send else None
        self.ranks = world_ranks(mpi_comm)
        self.rank = mpi_comm.rank
        self.sent_progress: Progress | None = None  # of this rank, once it has finished
        self.alarmed_at: float | None = None
        self.responses: dict[int, Response] = {}
        self._requests: list[MPI.Request] = []

    def send(self, content: _Content, tag: int, ranks: Iterable[int]) -> None:
        if self.mpi_comm is not None:
            data = pickle.dumps(content)
            self._requests += [self.mpi_comm.Isend(data, rank, tag) for rank in ranks
                               if rank != self.rank]

    def receive(self) -> list[tuple[int, int, _Content]]:
        """Returns sender, tag and content of all messages that have arrived."""
        received: list[tuple[int, int, _Content]] = []
        status = MPI.Status()
        while self.mpi_comm is not None:
            message = self.mpi_comm.Improbe(status=status)
            if message is None:
                break
            buffer = bytearray(status.Get_count())
            message.Recv(buffer)
            received.append((status.Get_source(), status.Get_tag(), pickle.loads(buffer)))
        return received


class Watchdog:
    """Polls the threads of this process, and exchanges alarms with other ranks."""

    def __init__(self) -> None:
        self._alone = _Group(MPI.COMM_SELF)  # until a group is added
        self._groups: list[_Group] = []
        self._default = parse_timeout(_environment.text(VARIABLE) or DEFAULT_TIMEOUT, VARIABLE)
        # By default there is none in shutdown: one rank may go on after the others have finished.
        self._shutdown_timeout = self._default if _environment.text(VARIABLE) else 0
        self._interval = _INTERVAL
        self.limit_interval(self._default)
        # By thread: its progress, and since when it is the same.
        self._progress: dict[int, tuple[tuple[object, ...], float]] = {}
        self._finished: dict[int, Progress] = {}  # by rank of COMM_WORLD
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add_group(self, mpi_comm: MPI.Intracomm) -> bool:
        """Adds the ranks of a communicator; returns whether they are new.

        Collective: every rank of it calls it.
        """
        self.start()
        ranks = set(world_ranks(mpi_comm))
        if mpi_comm.size == 1 or any(ranks <= set(group.ranks) for group in self._groups):
            return False
        self._groups.append(_Group(mpi_comm))
        return True

    def start(self) -> None:
        """Starts the thread if it is not running."""
        if self._thread is None and MPI.COMM_WORLD.size > 1:
            self._thread = threading.Thread(
                target=self._run, name='chainermn watchdog', daemon=True)
            self._thread.start()

    def limit_interval(self, timeout: float | None) -> None:
        """Shortens the interval of polls if a timeout requires it."""
        if timeout:
            self._interval = min(self._interval, timeout / 4)

    def wait_for_shutdown(self) -> None:
        """Returns once all other ranks have called it.  Collective: every rank calls it."""
        for group in self._groups:
            if group.mpi_comm is not None:
                request, pause = group.mpi_comm.Ibarrier(), 1e-5
                while not request.Test():
                    time.sleep(pause)
                    pause = min(2 * pause, .01)
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        errors = 0
        while errors < _MAX_ERRORS and not self._closed.wait(
                _INTERVAL_ALARMED if any(group.alarmed_at for group in self._groups)
                else self._interval):
            try:
                self._poll()
                errors = 0
            except Exception:  # the threads change while it polls them
                errors += 1
                if errors == _MAX_ERRORS:
                    _streams.write(f'{traceback.format_exc()}chainermn: the watchdog of this rank '
                                   'has stopped because of this error; timeouts have no effect\n')

    def _poll(self) -> None:
        recorder.write()  # in case this rank hangs or is killed
        now = time.monotonic()
        snapshots = thread_state.snapshots()
        before, self._progress = self._progress, {}
        for ident, snapshot in snapshots.items():
            progress, since = before.get(ident, ((), now))
            self._progress[ident] = snapshot.progress, (
                since if snapshot.progress == progress else now)
        self._send_progress(snapshots, now)
        for group in list(self._groups) or [self._alone]:
            for source, tag, content in group.receive():
                if isinstance(content, Progress):
                    self._finished[group.ranks[source]] = content
                elif isinstance(content, Response):
                    group.responses[source] = content
                if tag != _FINISHED and group.alarmed_at is None:
                    self._respond(group, '', {source}, snapshots, now)
            for ident, snapshot in snapshots.items():
                if snapshot.progress and group.alarmed_at is None and (
                        reason := self._hang(group, snapshot, now - self._progress[ident][1])):
                    self._respond(group, reason, (), snapshots, now)
            if group.alarmed_at is None and (reason := self._device_failure()):
                self._respond(group, reason, (), snapshots, now)
            if group.alarmed_at is not None:
                self._report(group, now)

    def _device_failure(self) -> str:
        """Returns why exchanges on devices, which block no operation, have failed; '' if not."""
        for device in list(_on_devices):
            if error := device.error():
                return f'NCCL failed: {error}'
            seconds, operation = device.running()
            timeout = self._default if device.timeout is None else device.timeout
            if timeout and seconds > timeout:
                return f'no progress for {seconds:.0f} s in {operation}; {_timeout_text(timeout)}'
        return ''

    def _hang(self, group: _Group, snapshot: Snapshot, seconds: float) -> str:
        """Returns why a thread hangs that has made no progress for some time; '' if it does not."""
        me = MPI.COMM_WORLD.rank
        timeout = self._default if snapshot.timeout is None else snapshot.timeout
        if snapshot.is_finished:
            timeout = self._shutdown_timeout
            if seconds > _GRACE and me in rank_progress.deadlocked(self._finished):
                return ('ranks have reached the end of the program, but some have communicators '
                        'that others lack, and wait for them')
        if timeout and seconds > timeout:
            return f'no progress for {seconds:.0f} s; {_timeout_text(timeout)}'
        if seconds > _GRACE and not snapshot.is_finished and (
                awaited := snapshot.awaited(self._finished) & set(group.ranks)):
            return (f'{ranks_text([me])} waits for {ranks_text(sorted(awaited))}, at the end of '
                    'the program')
        return ''

    def _send_progress(self, snapshots: _Snapshots, now: float) -> None:
        """Sends the progress of this rank to the others, once it has finished."""
        operations = [ident for ident, snapshot in snapshots.items() if snapshot.progress]
        if [snapshots[ident].is_finished for ident in operations] != [True] or (
                now - self._progress[operations[0]][1] < self._interval):
            return
        own = self._finished[MPI.COMM_WORLD.rank] = Progress.own()
        for group in self._groups:
            if group.sent_progress != own:
                group.sent_progress = own
                group.send(own, _FINISHED, range(len(group.ranks)))

    def _respond(self, group: _Group, reason: str, sources: Collection[int],
                 snapshots: _Snapshots, now: float) -> None:
        """Sends the state of this rank to the ranks that may report; raises an alarm for a reason.

        Args:
            group: The ranks.
            reason: For raising the alarm; '' if another rank raised it.
            sources: Ranks from which the alarm came.
            snapshots: Of the threads of this rank.
            now: The current time.
        """
        group.alarmed_at = now
        response = Response.of(reason, {
            ident: (snapshot.state, now - self._progress[ident][1])
            for ident, snapshot in snapshots.items()})
        group.responses[group.rank] = response
        reporters = set(range(min(_MAX_REPORTERS, len(group.ranks)))) | set(sources)
        group.send(response, _RESPONSE, reporters)
        if reason:
            group.send(None, _ALARM, set(range(len(group.ranks))) - reporters)

    def _report(self, group: _Group, now: float) -> None:
        """Prints the report and aborts the job, if all ranks have responded or had enough time."""
        assert group.alarmed_at is not None
        waited = now - group.alarmed_at
        if group.mpi_comm is None:  # each rank reports; the first one aborts the job
            is_complete, before = True, min(MPI.COMM_WORLD.rank, _MAX_REPORTERS)
        else:
            is_complete = len(group.responses) == len(group.ranks)
            before = sum(rank < group.rank for rank in group.responses)
        if waited < (0 if is_complete and not before else
                     _RESPONSE_TIMEOUT + _REPORT_TIMEOUT * before):
            return
        reasons = (response.reason for _, response in sorted(group.responses.items()))
        for device in list(_on_devices):  # in threads, as it may block too
            threading.Thread(target=device.abort, daemon=True).start()
        global_except_hook.abort_job(next(filter(None, reasons), ''), hang_report.text(
            {group.ranks[rank]: response for rank, response in group.responses.items()},
            group.ranks if group.mpi_comm is not None else (), group is self._alone))


def _timeout_text(timeout: float) -> str:
    return f"the timeout is {timeout:g} s ({VARIABLE}, or the communicator's timeout)"


class OnDevice(Protocol):
    """Exchanges on a device, which the watchdog polls."""

    @property
    def timeout(self) -> float | None:
        """Timeout per exchange in seconds, 0 for none, ``None`` for the default."""

    def error(self) -> str:
        """Returns an error of the device; '' if there is none."""

    def running(self) -> tuple[float, str]:
        """Returns for how many seconds the newest exchange has been running, and its name."""

    def abort(self) -> None:
        """Aborts the running exchanges."""


#: Exchanges on devices.  Replaced instead of changed, as the watchdog may iterate over it.
_on_devices: weakref.WeakSet[OnDevice] = weakref.WeakSet()


def add_device(exchanges: OnDevice) -> None:
    """Adds exchanges on a device, until :func:`remove_device`."""
    global _on_devices
    _on_devices = weakref.WeakSet({*_on_devices, exchanges})


def remove_device(exchanges: OnDevice) -> None:
    """Undoes :func:`add_device`."""
    global _on_devices
    _on_devices = weakref.WeakSet({*_on_devices} - {exchanges})


_watchdog: Watchdog | None = None
_process = 0


def get() -> Watchdog:
    """Returns the watchdog of this process."""
    global _watchdog, _process
    if _watchdog is None or _process != os.getpid():
        _watchdog, _process = Watchdog(), os.getpid()
    return _watchdog
