"""What a rank is doing just now, read from the stacks of its threads."""
from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import chainer
from mpi4py import MPI

from chainermn._diagnostics import call_site, flight_recorder, progress
from chainermn._diagnostics.flight_recorder import Call, Calls
from chainermn._diagnostics.progress import Progress
from chainermn._signature import END

_PACKAGES = call_site.PACKAGE, os.path.dirname(os.path.abspath(chainer.__file__)) + os.sep

#: The code of what may wait for other ranks, with the operation that it is.
_verbs: dict[CodeType, str] = {}


def know(functions: Iterable[Callable[..., Any]], verb: str = '') -> None:
    """Makes functions known that may wait for other ranks.

    Who they are methods of has a method ``recent_calls()``: the :class:`Calls` where calls are
    kept.
    """
    for function in functions:
        code = getattr(inspect.unwrap(function), '__code__', None)
        if isinstance(code, CodeType):
            _verbs[code] = verb or code.co_name


def know_class(kind: type) -> None:
    """Makes the public methods of a class known."""
    for base in kind.__mro__:
        know(value for name, value in vars(base).items() if not name.startswith('_'))


class Doing(NamedTuple):
    """What a thread of a rank is doing.  Ranks are those of COMM_WORLD."""

    verb: str  # that it is in, or ''
    call: Call | None  # that it is in, or else the newest one of this rank
    of: str  # which communicator, unless it is the first one of all ranks
    peers: tuple[int, ...]  # for which of them it waits
    site: str  # of the call, outside of this package and Chainer
    thread: str  # '' for the main one

    @property
    def text(self) -> str:
        """In words, the same on ranks that do the same."""
        where = f'at {self.site}'
        if self.thread:
            where += f' in thread {self.thread}'
        if not self.verb:
            last = f'; its last verb was {self.call.text}' if self.call else ''
            return f'not in a verb: it is {where}{last}'
        if self.verb == END:
            return 'at the end of the program'
        of = f' of {self.of}' if self.of else ''
        return f'in {self.call.text if self.call else self.verb}{of}, called {where}'


class Look:
    """A thread.  To be forgotten soon, as it keeps what the thread has in its hands."""

    def __init__(self, innermost: FrameType, operations: Sequence[FrameType], thread: str) -> None:
        self._innermost, self._operations, self._thread = innermost, operations, thread
        self._verb = operations[-1] if operations else None
        self._calls = () if self._verb is None else _calls_of(self._verb)

    @property
    def state(self) -> tuple[Any, ...]:
        """Changes when a thread makes progress in an operation; empty outside of operations."""
        if self._verb is None:
            return ()
        return self._verb.f_code, *(
            (calls, calls.count) for frame in self._operations for calls in _calls_of(frame))

    @property
    def is_at_the_end(self) -> bool:
        return self._verb is not None and _verbs[self._verb.f_code] == END

    def awaited(self, ended: Mapping[int, Progress]) -> set[int]:
        """Returns the ended ranks, of COMM_WORLD, for which this thread waits in vain."""
        found: set[int] = set()
        for frame in self._operations:
            for calls in _calls_of(frame):
                found |= progress.awaited(calls, _verbs[frame.f_code], ended)
            if (mpi_comm := _made_from(frame)) is not None:
                found |= progress.awaited_creation(flight_recorder.world_ranks(mpi_comm), ended)
        return found

    @property
    def limit(self) -> float | None:
        """Seconds that the communicator allows, if it says."""
        return self._calls[0].limit if self._calls else None

    @property
    def doing(self) -> Doing:
        if self._verb is None:
            newest = [calls.newest for calls in flight_recorder.everything()]
            return Doing('', next(filter(None, newest), None), '', (), _site(self._innermost),
                         self._thread)
        name = _verbs[self._verb.f_code]
        site = _site(self._verb.f_back or self._verb)
        for calls in self._calls:
            call = calls.newest
            if call is not None and name in (call.verb, END):
                peers = calls.ranks
                if call.peer is not None and call.peer >= 0:
                    peers = peers[call.peer],
                return Doing(name, call, _of(calls), peers, site, self._thread)
        # An operation that keeps no call of its name: it calls others, or is create_communicator.
        those = self._calls
        if (mpi_comm := _made_from(self._verb)) is not None:
            those = Calls(mpi_comm),
        of, peers = (_of(those[0]), those[0].ranks) if those else ('', ())
        return Doing(name, None, of, peers, site, self._thread)


def look() -> dict[int, Look]:
    """Looks at the main thread, and at all others that are in an operation."""
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    seen = {}
    for ident, innermost in sys._current_frames().items():
        operations = [frame for frame in _outwards(innermost) if frame.f_code in _verbs]
        if (operations or ident == main) and ident != threading.get_ident():
            name = '' if ident == main else names.get(ident, '?')
            seen[ident] = Look(innermost, operations, name)
    return seen


def stacks() -> str:
    """The stacks of all threads but this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return '\n'.join(
        f'Thread {names.get(ident, ident)}:\n' + ''.join(traceback.format_stack(frame)).rstrip()
        for ident, frame in sys._current_frames().items() if ident != threading.get_ident())


def _of(calls: Calls) -> str:
    is_first = calls.number == 1 and len(calls.ranks) == MPI.COMM_WORLD.size
    return '' if is_first else f'the {calls.name}' if calls.number == 1 else calls.name


def _calls_of(verb: FrameType) -> tuple[Calls, ...]:
    with contextlib.suppress(Exception):  # it may be finalized by now, or be no method
        owner = verb.f_locals[verb.f_code.co_varnames[0]]
        return tuple(owner.recent_calls())
    return ()


def _made_from(frame: FrameType) -> MPI.Intracomm | None:
    """What create_communicator makes a communicator from, if it is that which is called."""
    mpi_comm = frame.f_locals.get('mpi_comm')
    is_creation = _verbs[frame.f_code] == 'create_communicator'
    return mpi_comm if is_creation and isinstance(mpi_comm, MPI.Intracomm) else None


def _site(frame: FrameType) -> str:
    """File, line and function of the first frame that is not of a package that passes calls on."""
    here = next((frame for frame in _outwards(frame)
                 if not frame.f_code.co_filename.startswith(_PACKAGES)), frame)
    name = here.f_code.co_name
    return f'{os.path.basename(here.f_code.co_filename)}:{here.f_lineno}' + (
        '' if name == '<module>' else f' in {name}()')


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
