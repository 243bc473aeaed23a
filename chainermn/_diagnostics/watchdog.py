"""The watchdog: a thread in each rank that detects hangs, so that no rank waits forever.

It checks whether its rank makes progress: about once per second, more often while the rank waits.
It raises an alarm if the rank has been in one operation for longer than the timeout. Once the rank
has waited for a few seconds, the watchdog sends the state of its rank to the first rank, which
raises an alarm if it detects a deadlock. After an alarm, the watchdogs of all ranks respond with
the states of their ranks, the lowest responding rank prints the report, and the job is aborted.

The watchdogs exchange messages on their own communicators. This requires MPI_THREAD_MULTIPLE;
without it, each rank only reports its own state, and no deadlock is detected before the timeout.
"""
from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
import traceback
from collections.abc import Collection, Mapping, Sequence

from chainermn import global_except_hook
from chainermn._diagnostics import (
    devices,
    dump_request,
    flight_recorder,
    hang_report,
    live_view,
    metrics,
    stall_warning,
    timeouts,
)
from chainermn._diagnostics.flight_recorder import world_ranks
from chainermn._diagnostics.hang_report import Response
from chainermn._diagnostics.host_links import HostLinks
from chainermn._diagnostics.live_view import LiveView, Sample
from chainermn._diagnostics.rank_progress import RankProgress
from chainermn._diagnostics.thread_state import Snapshot
from chainermn._diagnostics.watchdog_group import (
    Confirmation,
    Content,
    MessageType,
    Question,
    State,
    WatchdogGroup,
)
from chainermn._process import environment, launcher, runtime, streams
from chainermn._process.mpi import MPI
from chainermn._process.running_time import RunningClock
from chainermn._timeline import recorder

# Seconds.
_INTERVAL = 1.
_INTERVAL_WAITING = .2
_INTERVAL_WATCHED = .5  # each poll takes some time from user code
_INTERVAL_ALARMED = .02
_RESPONSE_TIMEOUT = 2.5  # longer than the interval, because the other watchdogs have to wake up
_REPORT_TIMEOUT = 2.  # after this, the next rank reports, in case the previous one has stopped
_STAGGER = .05  # times log2(1 + rank), so that one rank raises the alarm before the others do

#: The watchdog stops after this number of consecutive errors.
_MAX_ERRORS = 3

#: The maximum number of ranks that may report.
_MAX_REPORTERS = 16


class Watchdog(runtime.ProcessState):
    """Polls the threads of this process and exchanges alarms with other ranks."""

    def __init__(self) -> None:
        self._alone = WatchdogGroup(MPI.COMM_SELF)  # until a group is added
        self._groups: list[WatchdogGroup] = []
        self._default = timeouts.from_environment(timeouts.VARIABLE, timeouts.DEFAULT)
        # No timeout during shutdown by default: one rank may continue after the others finish.
        self._shutdown_timeout = self._default if environment.text(timeouts.VARIABLE) else 0
        self._stall_seconds = timeouts.from_environment(
            environment.STALL_WARNING, stall_warning.DEFAULT)
        self._has_warned_of_creation = False
        self._detects_deadlocks = environment.flag(environment.DEADLOCKS, default=True)
        self._interval = _INTERVAL
        self.limit_interval(self._default)
        self._progress = RankProgress()
        self._clock = runtime.get(RunningClock)
        self._now = self._clock.poll()  # time of the last poll
        self._asked_at = -math.inf  # when another rank asked for the state of this one
        self._live = LiveView()
        self._metrics_target = environment.text(environment.METRICS)  # '' once it is open
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def in_child(self) -> bool:
        # Otherwise, viewers would not notice when the rank exits, because the child keeps copies of
        # the sockets.
        for viewer in self._live.viewers:
            viewer.abandon()
        return False

    def add_group(self, mpi_comm: MPI.Intracomm) -> bool:
        """Add the ranks of a communicator; return whether they are new.

        Collective: every rank of the communicator calls it.
        """
        self.start()
        ranks = set(world_ranks(mpi_comm))
        if mpi_comm.size == 1 or any(ranks <= set(group.ranks) for group in self._groups):
            return False
        self._groups.append(WatchdogGroup(mpi_comm))
        return True

    def connect_hosts(self, mpi_comm: MPI.Intracomm, hosts: Sequence[str]) -> None:
        """Connect the hosts of the ranks that were added last. Collective: every rank calls it.

        Args:
            mpi_comm: The communicator.
            hosts: The name of the host of each rank.
        """
        group = self._groups[-1]
        group.hosts = hosts
        group.links = HostLinks(mpi_comm, hosts, group.mpi_comm is not None)

    def start(self) -> None:
        """Start the thread if it is not running and has something to do.

        In a job with one rank, the thread only handles requests for the state and for metrics.
        """
        if self._thread is None and (MPI.COMM_WORLD.size > 1 or self._metrics_target
                                     or dump_request.are_pending()):
            self._thread = threading.Thread(
                target=self._run, name='chainermn watchdog', daemon=True)
            self._thread.start()

    def limit_interval(self, timeout: float | None) -> None:
        """Shorten the polling interval if a timeout requires it."""
        if timeout:
            self._interval = min(self._interval, timeout / 4)

    def wait_for_shutdown(self) -> None:
        """Stop the watchdog once all ranks have called this. Collective: every rank calls it."""
        for group in self._groups:
            if group.mpi_comm is not None:
                request, pause = group.mpi_comm.Ibarrier(), 1e-5
                while not request.Test():
                    time.sleep(pause)
                    pause = min(2 * pause, .01)
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        self._live.close()
        for group in self._groups:
            group.drain()
        for group in self._groups:
            if group.links is not None:
                group.links.close()

    def _run(self) -> None:
        errors = 0
        while errors < _MAX_ERRORS and not self._closed.wait(pause := self._pause()):
            try:
                self._now = self._clock.poll(pause)
                self._poll(self._now)
                errors = 0
            except Exception:  # the threads may change while they are polled
                errors += 1
                if errors == _MAX_ERRORS:
                    streams.write(f'{traceback.format_exc()}chainermn: the watchdog of rank '
                                  f'{MPI.COMM_WORLD.rank} has stopped because of this error. '
                                  'Timeouts no longer have an effect, and deadlocks may not be '
                                  'detected.\n')
            finally:
                self._progress.forget_threads()

    def _pause(self) -> float:
        if any(group.alarmed_at or group.question for group in self._groups) or (
                self._now < self._asked_at + _RESPONSE_TIMEOUT):
            return _INTERVAL_ALARMED
        return min(self._interval, _INTERVAL_WAITING if self._progress.is_waiting else
                   _INTERVAL_WATCHED if self._live.is_watched(self._now) else _INTERVAL)

    def _poll(self, now: float) -> None:
        recorder.write()  # in case this rank hangs or is killed
        self._progress.observe(now, self._interval)
        groups = list(self._groups) or [self._alone]
        largest = max(groups, key=lambda group: len(group.ranks))
        self._accept_requests(largest)
        if MPI.COMM_WORLD.size == 1:  # there are no other ranks to wait for
            self._ask(largest, now)
            groups = []
        for group in groups:
            if group.sent_state != self._progress.state:
                group.sent_state = self._progress.state
                group.send(MessageType.STATE, State(group.sent_state), [0])
            for source, tag, content in group.receive():
                self._receive(group, source, tag, content, now)
            self._ask(group, now)
            number, suspects = group.detector.new_suspects()
            if suspects and self._detects_deadlocks:
                group.send(MessageType.CONFIRM, number, (
                    rank for rank, each in enumerate(group.ranks) if each in suspects))
            for snapshot, seconds in self._progress.threads(now):
                seconds -= _STAGGER * math.log2(1 + group.rank)
                if snapshot.progress and group.alarmed_at is None and (
                        reason := self._hang(snapshot, seconds)):
                    self._respond(group, reason, (), now)
            if group.alarmed_at is None and group.links is not None and (
                    reason := group.links.failure(
                        functools.partial(group.send, MessageType.PING, None), now)):
                self._respond(group, reason, (), now)
            if group.alarmed_at is None and (reason := devices.failure(self._default)):
                self._respond(group, reason, (), now)
            if group.alarmed_at is not None:
                self._report(group, now)
            elif group is self._alone:
                self._warn_of_creation(now)
        self._show(largest, now)

    def _accept_requests(self, group: WatchdogGroup) -> None:
        """Accept requests from commands and from environment variables."""
        is_dump_requested, sockets = dump_request.requests()
        group.is_dump_requested |= is_dump_requested
        for name in sockets:
            with contextlib.suppress(OSError):
                self._live.viewers.append(live_view.connect(name))
        if self._metrics_target and len(group.ranks) == MPI.COMM_WORLD.size and (
                group.hosts or group is self._alone):
            target, self._metrics_target = self._metrics_target, ''
            is_first = not group.hosts or group.hosts.index(group.hosts[group.rank]) == group.rank
            if is_first and (viewer := metrics.open_viewer(target)):
                self._live.viewers.append(viewer)

    def _show(self, group: WatchdogGroup, now: float) -> None:
        """Send the newest samples to the viewers of this rank; request more from other ranks."""
        live = self._live
        live.poll(now)
        if live.is_due(len(group.ranks), now):
            live.add(self._sample(now), now)
            live.write(len(group.ranks), now)
            group.ask_for_samples(live.needed(group.hosts, group.rank))

    def _sample(self, now: float) -> Sample:
        """Return a sample of this rank, with the state of its main thread."""
        text, is_blocked, seconds = self._progress.main_thread(now)
        return self._live.sample(flight_recorder.n_operations(), text, is_blocked, seconds)

    def _receive(self, group: WatchdogGroup, source: int, tag: MessageType, content: Content,
                 now: float) -> None:
        """Handle a message from another watchdog, or from this one."""
        rank = group.ranks[source]
        if tag is MessageType.ASK:
            self._asked_at = now
            group.send(MessageType.ANSWER, self._progress.response('', now), [source])
        elif tag is MessageType.ANSWER and isinstance(content, Response):
            if group.question is not None:
                group.question.answers[rank] = content
        elif tag is MessageType.PING:
            group.send(MessageType.PONG, None, [source])
        elif tag is MessageType.PONG and group.links is not None:
            group.links.answered(source)
        elif tag in (MessageType.ALARM, MessageType.RESPONSE):
            if isinstance(content, Response):
                group.responses[source] = content
            if group.alarmed_at is None:
                self._respond(group, '', {source}, now)
        elif tag is MessageType.WATCH:
            self._live.note_question(now)
            group.send(MessageType.SAMPLE, self._sample(now), [source])
        elif isinstance(content, Sample):
            self._live.add(content, now)
        elif isinstance(content, State):
            group.detector.set_state(rank, content.state, now)
        elif isinstance(content, int):
            self._progress.observe(now, self._interval)  # the state after the question
            group.send(MessageType.CONFIRMED, Confirmation(content, self._progress.state), [source])
        elif isinstance(content, Confirmation):
            deadlock = group.detector.confirm(rank, content.number, content.state, now)
            if deadlock and group.alarmed_at is None:
                self._respond(group, f'deadlock: {deadlock}', (), now)

    def _ask(self, group: WatchdogGroup, now: float) -> None:
        """Ask all ranks for their states if necessary; print the answers."""
        text = None
        if group.question is not None:
            pass
        elif group.is_dump_requested:
            group.is_dump_requested = False
            text = functools.partial(self._dump_text, group)
        elif self._stall_seconds and group.detector.is_stalled(now, self._stall_seconds):
            text = functools.partial(
                stall_warning.text, dict(group.detector.states), seconds=self._stall_seconds)
        if text is not None:
            group.question = Question(text)
            self._send_question(group, group.ranks, now)
        question = group.question
        if question is None or not question.is_complete(now, _RESPONSE_TIMEOUT):
            return
        if question.is_second or group.mpi_comm is None:
            group.question = None
            streams.write(question.text(question.answers))
        else:
            question.is_second = True
            self._send_question(group, list(question.answers), now)

    def _warn_of_creation(self, now: float) -> None:
        """Warn once, on each node, if this rank waits for the others in its first operation."""
        for snapshot, seconds in self._progress.threads(now):
            if snapshot.progress and 0 < self._stall_seconds < seconds and (
                    not self._has_warned_of_creation):
                self._has_warned_of_creation = True
                if launcher.claim('stall'):
                    streams.write(stall_warning.creation_text(
                        MPI.COMM_WORLD.rank, snapshot.state.text, self._stall_seconds))

    def _send_question(self, group: WatchdogGroup, ranks: Sequence[int], now: float) -> None:
        """Ask ranks for their states; this rank answers immediately."""
        assert group.question is not None
        group.question.ask(now, ranks if group.mpi_comm is not None else ())
        group.question.answers[group.ranks[group.rank]] = self._progress.response('', now)
        group.send(MessageType.ASK, None, group.others)

    def _hang(self, snapshot: Snapshot, seconds: float) -> str:
        """Return a description of the hang if a thread has exceeded its timeout, otherwise ''."""
        timeout = self._default if snapshot.timeout is None else snapshot.timeout
        if snapshot.is_finished:
            timeout = self._shutdown_timeout
        if timeout and seconds > timeout:
            return f'no progress for {seconds:.0f} s; {timeouts.text(timeout)}'
        return ''

    def _respond(self, group: WatchdogGroup, reason: str, sources: Collection[int], now: float
                 ) -> None:
        """Send the state of this rank to the ranks that may report; raise an alarm if necessary.

        Args:
            group: The ranks.
            reason: The reason for raising the alarm; '' if another rank raised it.
            sources: The ranks that sent the alarm.
            now: The current time.
        """
        group.alarmed_at = now
        response = group.responses[group.rank] = self._progress.response(reason, now)
        reporters = set(range(min(_MAX_REPORTERS, len(group.ranks)))) | set(sources)
        group.send(MessageType.RESPONSE, response, reporters - {group.rank})
        if reason:
            group.send(MessageType.ALARM, None, set(group.others) - reporters)

    def _report(self, group: WatchdogGroup, now: float) -> None:
        """Print the report and abort the job once all ranks have responded or time is up."""
        assert group.alarmed_at is not None
        waited = now - group.alarmed_at
        if group.mpi_comm is None:  # each rank reports; the first one aborts the job
            is_complete, before = True, min(MPI.COMM_WORLD.rank, _MAX_REPORTERS)
        else:
            is_complete = len(group.responses) == len(group.ranks)
            before = _reporters_before(group.rank, group.responses)
        if waited < (0 if is_complete and not before else
                     _RESPONSE_TIMEOUT + _REPORT_TIMEOUT * before):
            return
        reasons = (response.reason for _, response in sorted(group.responses.items()))
        devices.abort()
        global_except_hook.abort_job(next(filter(None, reasons), ''), self._report_text(
            group, {group.ranks[rank]: response for rank, response in group.responses.items()}))

    def _dump_text(self, group: WatchdogGroup, answers: Mapping[int, Response]) -> str:
        return 'chainermn: the state of all ranks, as requested\n' + self._report_text(
            group, answers)

    def _report_text(self, group: WatchdogGroup, responses: Mapping[int, Response]) -> str:
        can_answer = group.mpi_comm is not None
        return hang_report.text(responses, group.ranks if can_answer else (),
                                group is self._alone and MPI.COMM_WORLD.size > 1,
                                group.hosts if can_answer else ())


def _reporters_before(rank: int, responded: Collection[int]) -> int:
    """Return the number of ranks that may report an alarm before a given rank does.

    The first ranks get all responses. A later rank gets some of them if it raised the alarm, and
    otherwise only its own. It therefore cannot know which of the first ranks are running, and
    gives them time to report.

    Args:
        rank: The rank.
        responded: The ranks whose responses it has received.
    """
    before = sum(other < rank for other in responded)
    if rank < _MAX_REPORTERS:
        return before
    return max(before, 1) if len(responded) > 1 else _MAX_REPORTERS


def get() -> Watchdog:
    """Return the watchdog of this process."""
    return runtime.get(Watchdog)
