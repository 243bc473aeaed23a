"""A thread of each rank ensures that nobody waits forever for a rank that will not come.

It wakes up once a second or so and looks whether its rank makes progress.  If the rank has been in
one operation for longer than the time limit, or waits for a message of ranks that have reached the
end of their programs, it raises an alarm: each thread says what its rank is doing, the lowest rank
that answers prints all of it, and ends the job.

These messages travel on a communicator of their own, which needs MPI_THREAD_MULTIPLE; without it
each rank knows of itself only.
"""
from __future__ import annotations

import math
import os
import pickle
import threading
import time
import traceback
import weakref
from typing import Any, Protocol

from mpi4py import MPI

from chainermn import _environment, _streams, global_except_hook
from chainermn._diagnostics import hang_report, progress, thread_state
from chainermn._diagnostics.flight_recorder import Calls
from chainermn._diagnostics.hang_report import Said
from chainermn._diagnostics.progress import Progress
from chainermn._ranks import ranks_text
from chainermn._tracing import recorder

VARIABLE = _environment.TIMEOUT

#: Seconds that an operation may take, where the environment and the communicator say nothing: long
#: enough for what one rank may do while the others wait, such as to prepare a data set.
LIMIT = 3600.

# Tags.
_ALARM, _SAID, _ENDED = 1, 2, 3

# Seconds.
_INTERVAL = 1.
_INTERVAL_ALARMED = .02
_COLLECTED_WITHIN = 2.5  # more than the interval, since others have to wake up
_NEXT_AFTER = 2.  # then the next rank reports, should the one before have come to a halt
_PATIENCE = 2.  # for a message that a rank sent just before it ended

#: Errors one after the other, at which it gives up.
_FAILURES = 3

#: How many ranks may be the one that reports.
_REPORTERS = 16


def limit_of(value: Any, name: str = 'a time limit') -> float:
    """Returns a time limit in seconds, 0 for none.

    Raises:
        TypeError, ValueError: If it is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f'{name} has to be a number of seconds, not {value!r}')
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not 0 <= limit < math.inf:
        raise ValueError(f'{name} has to be a number of seconds, 0 for none, not {value!r}')
    return limit


class _Group:
    """The ranks of a communicator, as far as their threads have heard of one another."""

    def __init__(self, mpi_comm: Any) -> None:
        can_talk = MPI.Query_thread() >= MPI.THREAD_MULTIPLE and mpi_comm.size > 1
        self.mpi_comm = mpi_comm.Dup() if can_talk else None
        self.ranks = Calls(mpi_comm).ranks
        self.rank = mpi_comm.rank
        self.told: Progress | None = None  # to the others, at the end of the program
        self.alarmed_at: float | None = None
        self.said: dict[int, Said] = {}
        self.sent: list[Any] = []

    def send(self, content: Any, tag: int, ranks: Any) -> None:
        if self.mpi_comm is not None:
            data = pickle.dumps(content)
            self.sent += [self.mpi_comm.Isend(data, rank, tag) for rank in ranks
                          if rank != self.rank]

    def receive(self) -> list[tuple[int, int, Any]]:
        """Who sent what under which tag."""
        received = []
        status = MPI.Status()
        while self.mpi_comm is not None:
            message = self.mpi_comm.Improbe(status=status)
            if message is None:
                break
            buffer = bytearray(status.Get_count())
            message.Recv(buffer)
            received.append((status.Get_source(), status.Get_tag(), pickle.loads(buffer)))
        return received


class Watch:
    """Watches this process, and tells the other ranks of the communicators that it was given."""

    def __init__(self) -> None:
        self._alone = _Group(MPI.COMM_SELF)  # until there is another one
        self._groups: list[_Group] = []
        self._default = limit_of(_environment.text(VARIABLE) or LIMIT, VARIABLE)
        # One rank may go on for long when the others have ended, unless somebody says otherwise.
        self._at_the_end = self._default if _environment.text(VARIABLE) else 0
        self._interval = _INTERVAL
        self.allow(self._default)
        self._since: dict[int, tuple[tuple[Any, ...], float]] = {}  # by thread
        self._ended: dict[int, Progress] = {}  # ranks at the end of the program, of COMM_WORLD
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def cover(self, mpi_comm: Any) -> bool:
        """Watches over the ranks of a communicator; says whether that is new.

        Collective: every rank of it calls it.
        """
        self.start()
        ranks = set(Calls(mpi_comm).ranks)
        if mpi_comm.size == 1 or any(ranks <= set(group.ranks) for group in self._groups):
            return False
        self._groups.append(_Group(mpi_comm))
        return True

    def start(self) -> None:
        """Starts the thread, unless it runs."""
        if self._thread is None and MPI.COMM_WORLD.size > 1:
            self._thread = threading.Thread(target=self._run, name='chainermn watch', daemon=True)
            self._thread.start()

    def allow(self, limit: float | None) -> None:
        """Wakes up often enough for a time limit."""
        if limit:
            self._interval = min(self._interval, limit / 4)

    def wait_for_the_end(self) -> None:
        """Returns once all other ranks have come here.  Collective: every rank calls it."""
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
        failures = 0
        while failures < _FAILURES and not self._closed.wait(
                _INTERVAL_ALARMED if any(group.alarmed_at for group in self._groups)
                else self._interval):
            try:
                self._look()
                failures = 0
            except Exception:  # what it looks at changes meanwhile
                failures += 1
                if failures == _FAILURES:
                    _streams.write(f'{traceback.format_exc()}chainermn: this rank is watched over '
                                   'no more, because of this error; time limits do not hold any '
                                   'more\n')

    def _look(self) -> None:
        recorder.write()  # what this rank did, should it hang or be killed
        now = time.monotonic()
        seen = thread_state.look()
        before, self._since = self._since, {}
        for ident, look in seen.items():
            state, since = before.get(ident, ((), now))
            self._since[ident] = look.state, since if look.state == state else now
        self._tell_the_end(seen, now)
        for group in list(self._groups) or [self._alone]:
            for source, tag, content in group.receive():
                if tag == _ENDED:
                    self._ended[group.ranks[source]] = content
                elif tag == _SAID:
                    group.said[source] = content
                if tag != _ENDED and group.alarmed_at is None:
                    self._tell(group, '', {source}, seen, now)
            for ident, look in seen.items():
                if look.state:
                    self._check(group, look, now - self._since[ident][1], seen, now)
            if group.alarmed_at is None and (why := self._wrong_on_devices()):
                self._tell(group, why, (), seen, now)
            if group.alarmed_at is not None:
                self._report(group, now)

    def _wrong_on_devices(self) -> str:
        """What is wrong with the exchanges on the device, which block no operation."""
        for device in list(_on_devices):
            if error := device.error():
                return f'NCCL failed: {error}'
            seconds, what = device.waits()
            limit = self._default if device.limit is None else device.limit
            if limit and seconds > limit:
                return (f'no progress for {seconds:.0f} s in {what}, and the time limit is '
                        f'{limit:g} s ({VARIABLE}, or timeout of the communicator)')
        return ''

    def _check(self, group: _Group, look: thread_state.Look, seconds: float,
               seen: dict[int, thread_state.Look], now: float) -> None:
        if group.alarmed_at is not None:
            return
        limit = self._default if look.limit is None else look.limit
        if look.is_at_the_end:
            limit = self._at_the_end
            if seconds > _PATIENCE and MPI.COMM_WORLD.rank in progress.deadlocked(self._ended):
                self._tell(group, 'ranks have reached the end of the program, but some have '
                           'communicators that others lack, and wait for them', (), seen, now)
        if limit and seconds > limit:
            self._tell(group, f'no progress for {seconds:.0f} s, and the time limit is '
                       f'{limit:g} s ({VARIABLE}, or timeout of the communicator)', (), seen, now)
        elif seconds > _PATIENCE and not look.is_at_the_end and (
                gone := look.awaited(self._ended) & set(group.ranks)):
            self._tell(group, f'{ranks_text([MPI.COMM_WORLD.rank])} waits for '
                       f'{ranks_text(sorted(gone))}, at the end of the program', (), seen, now)

    def _tell_the_end(self, seen: dict[int, thread_state.Look], now: float) -> None:
        """Tells the other ranks how far this one has come, once it does nothing but end."""
        operations = [(ident, look) for ident, look in seen.items() if look.state]
        if [look.is_at_the_end for _, look in operations] != [True] or (
                now - self._since[operations[0][0]][1] < self._interval):
            return
        own = self._ended[MPI.COMM_WORLD.rank] = Progress.own()
        for group in self._groups:
            if group.told != own:
                group.told = own
                group.send(own, _ENDED, range(len(group.ranks)))

    def _tell(self, group: _Group, why: str, sources: Any, seen: dict[int, thread_state.Look],
              now: float) -> None:
        """Says what this rank is doing, to those who may report it and to who asked."""
        group.alarmed_at = now
        said = Said.of(why, {
            ident: (look.doing, now - self._since[ident][1]) for ident, look in seen.items()})
        group.said[group.rank] = said
        reporters = set(range(min(_REPORTERS, len(group.ranks)))) | set(sources)
        group.send(said, _SAID, reporters)
        if why:
            group.send(None, _ALARM, set(range(len(group.ranks))) - reporters)

    def _report(self, group: _Group, now: float) -> None:
        assert group.alarmed_at is not None
        waited = now - group.alarmed_at
        if group.mpi_comm is None:  # each rank would report; the first that does ends the job
            is_complete, before = True, min(MPI.COMM_WORLD.rank, _REPORTERS)
        else:
            is_complete = len(group.said) == len(group.ranks)
            before = sum(rank < group.rank for rank in group.said)
        if waited < (0 if is_complete and not before else
                     _COLLECTED_WITHIN + _NEXT_AFTER * before):
            return
        why = next(filter(None, (said.why for _, said in sorted(group.said.items()))), '')
        for device in list(_on_devices):  # in threads, as it may wait, too
            threading.Thread(target=device.abort, daemon=True).start()
        global_except_hook.end_the_job(why, hang_report.text(
            {group.ranks[rank]: said for rank, said in group.said.items()},
            group.ranks if group.mpi_comm is not None else (), group is self._alone))


#: Exchanges on devices, which block no operation.  Never changed but replaced, as the watchdog may
#: be looking through it.
_on_devices: weakref.WeakSet[OnDevice] = weakref.WeakSet()


class OnDevice(Protocol):
    """Exchanges on a device, which the watchdog watches."""

    @property
    def limit(self) -> float | None:
        """Seconds that an exchange may take, 0 for any time; ``None`` if nothing is set."""

    def error(self) -> str:
        """What has failed; '' if nothing has."""

    def waits(self) -> tuple[float, str]:
        """For how many seconds the oldest exchange has been running, and which one it is."""

    def abort(self) -> None:
        """Ends what is running."""


def add_device(exchanges: OnDevice) -> None:
    """Watches exchanges on a device, until :func:`remove_device`."""
    global _on_devices
    _on_devices = weakref.WeakSet({*_on_devices, exchanges})


def remove_device(exchanges: OnDevice) -> None:
    """Undoes :func:`add_device`."""
    global _on_devices
    _on_devices = weakref.WeakSet({*_on_devices} - {exchanges})


_watch: Watch | None = None
_process = 0


def get() -> Watch:
    """The watch of this process."""
    global _watch, _process
    if _watch is None or _process != os.getpid():
        _watch, _process = Watch(), os.getpid()
    return _watch
