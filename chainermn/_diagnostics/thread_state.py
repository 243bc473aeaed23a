"""The state of each thread of this rank: its current operation and its call site."""
from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple

from chainermn._diagnostics import call_site, current_operations, flight_recorder
from chainermn._diagnostics.current_operations import CurrentOperation
from chainermn._diagnostics.deadlocks import rank_progress
from chainermn._diagnostics.deadlocks.wait_graph import ThreadWait, Wait
from chainermn._diagnostics.flight_recorder import Call, FlightRecord, Key, ServiceRecord
from chainermn._operations.table import END
from chainermn._process.mpi import MPI

#: The start of the names of the threads that ``host_links`` starts.
HOST_LINK = 'chainermn link'


class ThreadState(NamedTuple):
    """The state of a thread."""

    operation: str  # the current one, or ''
    call: Call | None  # the current one, or else the newest one of this rank
    communicator: Key | None  # of the current operation
    of: str  # the same in words; '' for the first one of all ranks
    call_site: str  # in the program, outside of this package and Chainer
    thread: str  # '' for the main thread

    @property
    def text(self) -> str:
        """The state in words, equal on ranks in the same state."""
        location = f'at {self.call_site}'
        if self.thread:
            location += f' in thread {self.thread}'
        if not self.operation:
            last = f'; its last operation was {self.call.text}' if self.call else ''
            return f'not in an operation: it is {location}{last}'
        if self.operation == END:
            return 'at the end of the program'
        return f'in {self._operation}, called {location}'

    @property
    def outline(self) -> str:
        """The text without arguments and peers."""
        thread = f' in thread {self.thread}' if self.thread else ''
        if self.operation == END:
            return self.text
        where = f'in {self.operation}, called' if self.operation else 'not in an operation: it is'
        return f'{where} at {self.call_site}{thread}'

    @property
    def wait_text(self) -> str:
        """The operation in which the thread waits, for reports of deadlocks."""
        return self._waiting_in(self._operation)

    @property
    def wait_outline(self) -> str:
        """The same without arguments and peers."""
        return self._waiting_in(self.operation)

    def _waiting_in(self, operation: str) -> str:
        if self.operation == END:
            return 'at the end of the program'
        thread = f' in thread {self.thread}' if self.thread else ''
        return f'in {operation} ({self.call_site}{thread})'

    @property
    def _operation(self) -> str:
        of = f' of {self.of}' if self.of else ''
        return f'{self.call.text if self.call else self.operation}{of}'


class Snapshot:
    """A snapshot of a thread.  Short-lived: it keeps the locals of the thread alive."""

    def __init__(self, innermost: FrameType, operations: Sequence[CurrentOperation], thread: str,
                 ident: int) -> None:
        self._innermost, self._operations, self._thread = innermost, operations, thread
        self._ident = ident
        # The one that the program called.
        self._name, self._calls = operations[-1] if operations else CurrentOperation('', ())

    @property
    def progress(self) -> tuple[object, ...]:
        """Changes when a thread makes progress in an operation; empty outside of operations."""
        if not self._operations:
            return ()
        return self._name, *((calls, calls.count)
                             for operation in self._operations for calls in operation.calls)

    @property
    def is_finished(self) -> bool:
        """Whether the thread is in the shutdown."""
        return self._name == END

    @property
    def wait(self) -> ThreadWait:
        """What this thread waits for."""
        waits = [Wait.of(calls, operation.name, self._ident)
                 for operation in self._operations for calls in operation.calls]
        if self.is_finished and (ending := rank_progress.shutdown().ending) is not None:
            waits.append(Wait.of(ending, END))
        service = next((calls.key for calls in flight_recorder.everything() if isinstance(
            calls, ServiceRecord) and calls.thread == self._ident), None)
        state = self.state
        return ThreadWait(state.wait_text, tuple(wait for wait in waits if wait is not None),
                          service, state.wait_outline)

    @property
    def timeout(self) -> float | None:
        """The timeout of the communicator in seconds; ``None`` if it has none of its own."""
        return self._calls[0].effective_timeout if self._calls else None

    @property
    def state(self) -> ThreadState:
        if not self._operations:
            newest = [calls.newest for calls in flight_recorder.everything()]
            return ThreadState('', next(filter(None, newest), None), None, '',
                               _call_site(self._innermost), self._thread)
        site = _call_site(_caller(self._innermost))
        for calls in self._calls:
            call = calls.newest_of(self._ident)
            if call is None:
                continue
            # An error that this rank raises on all ranks is recorded as that of its operation.
            name = call.operation if self._name == 'refuse' else self._name
            if name in (call.operation, END):
                return ThreadState(name, call, calls.key, _of(calls), site, self._thread)
        # It records no call of this name: it calls other operations, or is create_communicator.
        key, of = (self._calls[0].key, _of(self._calls[0])) if self._calls else (None, '')
        return ThreadState(self._name, None, key, of, site, self._thread)


def snapshots() -> dict[int, Snapshot]:
    """Take a snapshot of the main thread, and of all other threads that are in an operation."""
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = {}
    for ident, innermost in sys._current_frames().items():
        operations = current_operations.of_thread(ident)
        if (operations or ident == main) and ident != threading.get_ident():
            name = '' if ident == main else names.get(ident, '?')
            found[ident] = Snapshot(innermost, operations, name, ident)
    return found


def stacks() -> str:
    """Format the stacks of all threads except this one and those of host links; main first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    return '\n'.join(
        f'Thread {names.get(ident, ident)}:\n' + ''.join(traceback.format_stack(frame)).rstrip()
        for ident, frame in sorted(sys._current_frames().items(), key=lambda each: each[0] != main)
        if ident != threading.get_ident() and not names.get(ident, '').startswith(HOST_LINK))


def _of(calls: FlightRecord) -> str:
    is_first = calls.number == 1 and len(calls.ranks) == MPI.COMM_WORLD.size
    return '' if is_first else f'the {calls.name}' if calls.number == 1 else calls.name


def _caller(innermost: FrameType) -> FrameType:
    """Return the frame that called the outermost operation of a thread."""
    wrappers = [frame for frame in call_site.outwards(innermost)
                if frame.f_code.co_filename in call_site.WRAPPERS]
    outermost = wrappers[-1] if wrappers else innermost
    return outermost.f_back or outermost


def _call_site(frame: FrameType) -> str:
    """Return file, line and function of the innermost frame of the program."""
    found = next((frame for frame in call_site.outwards(frame)
                  if not frame.f_code.co_filename.startswith(call_site.PACKAGES)), frame)
    name = found.f_code.co_name
    return f'{os.path.basename(found.f_code.co_filename)}:{found.f_lineno}' + (
        '' if name == '<module>' else f' in {name}()')
