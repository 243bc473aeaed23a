"""The state of each thread of this rank: its current operation and its call site."""
from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType

from chainermn._diagnostics import call_site, flight_recorder, thread_frames
from chainermn._diagnostics.deadlocks import rank_state
from chainermn._diagnostics.deadlocks.rank_state import ThreadState, Wait
from chainermn._diagnostics.flight_recorder import FlightRecord, MessageRecord, ServiceRecord
from chainermn._operations import call as calls_of_threads
from chainermn._operations.call import Call
from chainermn._operations.table import END
from chainermn._process import environment
from chainermn._process.mpi import MPI
from chainermn._process.program_place import PACKAGES

#: The prefix of the names of the threads that ``host_links`` and ``run_link`` start.
HOST_LINK = 'chainermn link'


class Snapshot:
    """A snapshot of a thread. Short-lived: it keeps the communicators of its calls alive."""

    def __init__(self, calls: Sequence[Call], thread: str, ident: int) -> None:
        self._calls, self._thread, self._ident = calls, thread, ident
        self._records = [flight_recorder.of_owner(call) for call in calls]
        # The operation that user code called.
        self._name = calls[-1].operation if calls else ''

    @property
    def progress(self) -> tuple[object, ...]:
        """A value that changes when the thread makes progress in an operation; empty outside."""
        if not self._calls:
            return ()
        return self._name, *((record, record.count)
                             for records in self._records for record in records)

    @property
    def is_finished(self) -> bool:
        """Whether the thread is in the shutdown."""
        return self._name == END

    @property
    def timeout(self) -> float | None:
        """The timeout of the communicator in seconds; ``None`` if the communicator sets none."""
        records = self._records[-1] if self._records else ()
        return records[0].effective_timeout if records else None

    @property
    def state(self) -> ThreadState:
        """The state, with the call site where the thread is now."""
        if not self._calls:
            newest = [record.newest for record in flight_recorder.all_records()]
            call = next(filter(None, newest), None)
            return ThreadState('', call.text if call else '', '', self._call_site, self._thread)
        call, records = self._calls[-1], self._records[-1]
        if call.peer is not None:
            records = tuple(record for record in records if isinstance(record, MessageRecord))
        service = next((record.key for record in flight_recorder.all_records() if isinstance(
            record, ServiceRecord) and record.thread == self._ident), None)
        return ThreadState(
            # Calls of create_communicator, and calls that call other operations, are not recorded.
            call.operation, call.text if call.number else '',
            _communicator_text(records[0]) if records else '', self._call_site, self._thread,
            (*self._waits(),), service)

    @property
    def _call_site(self) -> str:
        """The file, line and function of user code; empty if the thread has ended."""
        with thread_frames.current() as frames:
            frame = frames.get(self._ident)
            if frame is None:
                return ''
            return _call_site(_caller(frame) if self._calls else frame)

    def _waits(self) -> Iterator[Wait]:
        for call, records in zip(self._calls, self._records, strict=True):
            yield from filter(None, (Wait.of(record, call) for record in records))
        if self.is_finished and (ending := rank_state.shutdown().ending) is not None:
            yield from filter(None, [Wait.of(ending, self._calls[-1])])


def snapshots() -> dict[int, Snapshot]:
    """Take a snapshot of the main thread and of all other threads that are in an operation."""
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = {}
    for ident in dict.fromkeys([main, *sorted(calls_of_threads.threads())]):
        calls = [] if ident is None else calls_of_threads.of_thread(ident)
        if ident is not None and ident != threading.get_ident() and (calls or ident == main):
            name = '' if ident == main else names.get(ident, '?')
            found[ident] = Snapshot(calls, name, ident)
    return found


def stacks() -> str:
    """Format the stacks of all threads except this one and the host links, the main thread first.

    Frames of this package and of Chainer are omitted unless ``CHAINERMN_DEBUG=1`` is set.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    with thread_frames.current() as frames:
        return '\n'.join(
            f'Thread {names.get(ident, ident)}:\n{_stack(ident, frame)}'
            for ident, frame in sorted(frames.items(), key=lambda each: each[0] != main)
            if ident != threading.get_ident() and not names.get(ident, '').startswith(HOST_LINK))


def _stack(ident: int, innermost: FrameType) -> str:
    """Format the user-code frames of a thread, followed by the operation that it has called."""
    summary = traceback.extract_stack(innermost)
    if environment.flag(environment.DEBUG):
        return ''.join(summary.format()).rstrip()
    calls = calls_of_threads.of_thread(ident)
    # If the thread is not in an operation, keep the innermost frame: it shows what the thread
    # waits for.
    shown = traceback.StackSummary.from_list([
        frame for frame in summary
        if not frame.filename.startswith(PACKAGES) or (frame is summary[-1] and not calls)])
    return '\n'.join([*''.join(shown.format()).splitlines(),
                      *(f'  in {call.operation}' for call in calls[-1:])])


def _communicator_text(record: FlightRecord) -> str:
    """Return the name of a communicator; '' for the first communicator of all ranks."""
    is_first = record.number == 1 and len(record.ranks) == MPI.COMM_WORLD.size
    return '' if is_first else f'the {record.name}' if record.number == 1 else record.name


def _caller(innermost: FrameType) -> FrameType:
    """Return the frame that called the outermost operation of a thread."""
    wrappers = [frame for frame in call_site.outwards(innermost)
                if frame.f_code.co_filename == call_site.WRAPPER]
    outermost = wrappers[-1] if wrappers else innermost
    return outermost.f_back or outermost


def _call_site(frame: FrameType) -> str:
    """Return the file, line and function of the innermost frame of user code."""
    found = next((frame for frame in call_site.outwards(frame)
                  if not frame.f_code.co_filename.startswith(PACKAGES)), frame)
    name = found.f_code.co_name
    return f'{os.path.basename(found.f_code.co_filename)}:{found.f_lineno}' + (
        '' if name == '<module>' else f' in {name}()')
