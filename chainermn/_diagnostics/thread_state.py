"""The state of each thread of this rank: its current operation, read from its stack."""
from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import NamedTuple

from mpi4py import MPI

from chainermn._diagnostics import call_site, flight_recorder, rank_progress
from chainermn._diagnostics.flight_recorder import Call, Calls
from chainermn._diagnostics.rank_progress import Progress
from chainermn._signature import END

#: The code of functions that may wait for other ranks, with the name of the operation.
_registered: dict[CodeType, str] = {}


def register(functions: Iterable[Callable[..., object]], operation: str = '') -> None:
    """Registers functions that may wait for other ranks.

    If they are methods, their class has a method ``flight_records()``, which returns
    :class:`Calls`.
    """
    for function in functions:
        code = getattr(inspect.unwrap(function), '__code__', None)
        if isinstance(code, CodeType):
            _registered[code] = operation or code.co_name


def register_class(kind: type) -> None:
    """Registers the public methods of a class."""
    for base in kind.__mro__:
        register(value for name, value in vars(base).items() if not name.startswith('_'))


class ThreadState(NamedTuple):
    """The state of a thread.  Ranks are those of COMM_WORLD."""

    operation: str  # the current one, or ''
    call: Call | None  # the current one, or else the newest one of this rank
    of: str  # the communicator; '' for the first one of all ranks
    peers: tuple[int, ...]  # ranks that it waits for
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
        of = f' of {self.of}' if self.of else ''
        return f'in {self.call.text if self.call else self.operation}{of}, called {location}'


class Snapshot:
    """A snapshot of a thread.  Short-lived: it keeps the locals of the thread alive."""

    def __init__(self, innermost: FrameType, operations: Sequence[FrameType], thread: str) -> None:
        self._innermost, self._operations, self._thread = innermost, operations, thread
        self._operation = operations[-1] if operations else None
        self._calls = () if self._operation is None else _calls_of(self._operation)

    @property
    def progress(self) -> tuple[object, ...]:
        """Changes when a thread makes progress in an operation; empty outside of operations."""
        if self._operation is None:
            return ()
        return self._operation.f_code, *(
            (calls, calls.count) for frame in self._operations for calls in _calls_of(frame))

    @property
    def is_finished(self) -> bool:
        """Whether the thread is in the shutdown."""
        return self._operation is not None and _registered[self._operation.f_code] == END

    def awaited(self, finished: Mapping[int, Progress]) -> set[int]:
        """Returns the finished ranks of COMM_WORLD for which this thread waits in vain."""
        found: set[int] = set()
        for frame in self._operations:
            for calls in _calls_of(frame):
                found |= rank_progress.awaited(calls, _registered[frame.f_code], finished)
            if (mpi_comm := _creation_from(frame)) is not None:
                found |= rank_progress.awaited_creation(
                    flight_recorder.world_ranks(mpi_comm), finished)
        return found

    @property
    def timeout(self) -> float | None:
        """The timeout of the communicator in seconds; ``None`` if it has none of its own."""
        return self._calls[0].timeout if self._calls else None

    @property
    def state(self) -> ThreadState:
        if self._operation is None:
            newest = [calls.newest for calls in flight_recorder.everything()]
            return ThreadState('', next(filter(None, newest), None), '', (),
                               _call_site(self._innermost), self._thread)
        name = _registered[self._operation.f_code]
        site = _call_site(self._operation.f_back or self._operation)
        for calls in self._calls:
            call = calls.newest
            if call is not None and name in (call.operation, END):
                peers = calls.ranks
                if call.peer is not None and call.peer >= 0:
                    peers = peers[call.peer],
                return ThreadState(name, call, _of(calls), peers, site, self._thread)
        # It records no call of this name: it calls other operations, or is create_communicator.
        records = self._calls
        if (mpi_comm := _creation_from(self._operation)) is not None:
            records = Calls(mpi_comm),
        of, peers = (_of(records[0]), records[0].ranks) if records else ('', ())
        return ThreadState(name, None, of, peers, site, self._thread)


def snapshots() -> dict[int, Snapshot]:
    """Takes a snapshot of the main thread, and of all other threads that are in an operation."""
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = {}
    for ident, innermost in sys._current_frames().items():
        operations = [frame for frame in _outwards(innermost) if frame.f_code in _registered]
        if (operations or ident == main) and ident != threading.get_ident():
            name = '' if ident == main else names.get(ident, '?')
            found[ident] = Snapshot(innermost, operations, name)
    return found


def stacks() -> str:
    """Formats the stacks of all threads except this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return '\n'.join(
        f'Thread {names.get(ident, ident)}:\n' + ''.join(traceback.format_stack(frame)).rstrip()
        for ident, frame in sys._current_frames().items() if ident != threading.get_ident())


def _of(calls: Calls) -> str:
    is_first = calls.number == 1 and len(calls.ranks) == MPI.COMM_WORLD.size
    return '' if is_first else f'the {calls.name}' if calls.number == 1 else calls.name


def _calls_of(operation: FrameType) -> tuple[Calls, ...]:
    with contextlib.suppress(Exception):  # it may be finalized by now, or be no method
        owner = operation.f_locals[operation.f_code.co_varnames[0]]
        return tuple(owner.flight_records())
    return ()


def _creation_from(frame: FrameType) -> MPI.Intracomm | None:
    """Returns the argument of create_communicator, if that is the operation."""
    mpi_comm = frame.f_locals.get('mpi_comm')
    is_creation = _registered[frame.f_code] == 'create_communicator'
    return mpi_comm if is_creation and isinstance(mpi_comm, MPI.Intracomm) else None


def _call_site(frame: FrameType) -> str:
    """Returns file, line and function of the innermost frame of the program."""
    found = next((frame for frame in _outwards(frame)
                  if not frame.f_code.co_filename.startswith(call_site.PACKAGES)), frame)
    name = found.f_code.co_name
    return f'{os.path.basename(found.f_code.co_filename)}:{found.f_lineno}' + (
        '' if name == '<module>' else f' in {name}()')


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
