"""A call: one execution of an operation in one thread, from beginning to end.

:func:`entered` turns a function into an operation; only such functions begin a call that a thread
is in. The flight recorder keeps the last calls of a communicator and adds one for each further
communication step of an operation. The watchdog reads the calls that each thread is in, error
messages name them, and an :class:`Instrument`, such as the timeline, is notified when a call begins
or ends.
"""
from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any, Protocol, TypeVar, cast

from chainermn._operations import call_signature, message_header
from chainermn._operations.table import Waits, waiting_for
from chainermn._process import runtime

_Function = TypeVar('_Function', bound=Callable[..., Any])

#: The preposition before the peer of an operation; 'from' for all others.
_PREPOSITIONS = {**dict.fromkeys(waiting_for(Waits.RECEIVER), 'to'), 'isend': 'to', 'wait': 'for'}


class Call:
    """A call. There is no constructor, because it would take as long as all other work on a call.

    Attributes:
        operation: The name of the operation.
        owner: The communicator, or another object with operations. ``None`` once the call is over,
            so that a flight record does not keep a communicator alive.
        outer: The enclosing call in the same thread.
        number: The number of the call in the flight record, from 1; 0 if it is not recorded (yet).
        signature: The signature that the ranks compare.
        header: The header of a message, if it was recorded.
        peer: The peer of a message; negative for any rank.
        tag: The tag of a message; negative for any tag.
        words: Additional text for reports.
        asked: The ranks in COMM_WORLD to which a request to a service is sent.
        place: The code object and the instruction of the user code that made the call, if known.
    """

    operation: str = ''
    owner: Any = None
    outer: Call | None = None
    number: int = 0
    signature: bytes | None = None
    header: bytes | None = None
    peer: int | None = None
    tag: int | None = None
    words: str = ''
    asked: Sequence[int] = ()
    place: tuple[CodeType, int] | None = None

    @property
    def details(self) -> str:
        """The arguments of the call as text."""
        parts = []
        if self.peer is not None and self.tag is not None:
            parts = [_PREPOSITIONS.get(self.operation, 'from'),
                     'any rank' if self.peer < 0 else f'rank {self.peer}',
                     'any tag' if self.tag < 0 else f'tag {self.tag}']
        if self.signature is not None:
            parts.append(call_signature.unpack(self.signature).arguments)
        if self.header is not None:
            parts.append(message_header.read(self.header)[0].description)
        return ' '.join(filter(None, [*parts, self.words]))

    @property
    def text(self) -> str:
        """The operation, the number and the details."""
        return f'{self.operation} #{self.number} {self.details}'.rstrip()

    @property
    def site(self) -> str:
        """The file and line of the user code that made the call, or ''."""
        if self.place is None:
            return ''
        code, instruction = self.place
        line = next((line for start, end, line in code.co_lines()
                     if start <= instruction < end), None)
        return f'{os.path.basename(code.co_filename)}:{line or code.co_firstlineno}'


# CPython stores attributes in an array instead of a dict if the first object of a class has all of
# them.
_first = Call()
for _name in Call.__annotations__:
    setattr(_first, _name, getattr(Call, _name))


class Instrument(Protocol):
    """An observer of the calls of all threads."""

    def begin(self, call: Call) -> None:
        """Handle the beginning of a call."""

    def end(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], result: object,
            error: BaseException | None) -> None:
        """Handle the end of a call.

        Args:
            call: The call.
            args: The positional arguments of the function. The first one is the owner.
            kwargs: The keyword arguments.
            result: The result of the function.
            error: The error that the function raised, or ``None``.
        """


class Thread:
    """A thread: its innermost call, and the instruments to notify."""

    __slots__ = '__weakref__', 'innermost', 'instruments'

    def __init__(self, instruments: list[Instrument]) -> None:
        self.innermost: Call | None = None
        self.instruments = instruments


class _Threads(runtime.ProcessState):
    """The threads of this process that have used operations, and the instruments to notify."""

    def __init__(self) -> None:
        # Thread identifiers are reused, but the objects exist only as long as their threads.
        self.threads: weakref.WeakValueDictionary[int, Thread] = weakref.WeakValueDictionary()
        self.instruments: list[Instrument] = []

    def in_child(self) -> bool:
        self.instruments.clear()
        return True  # the thread that forked continues


class _Local(threading.local):
    def __init__(self) -> None:
        process = runtime.get(_Threads)
        self.thread = process.threads[threading.get_ident()] = Thread(process.instruments)


#: ``local.thread`` is the calling thread.
local = _Local()


def entered(operation: str, begin: Callable[[Call], Any] | None = None,
            fail: Callable[..., None] | None = None) -> Callable[[_Function], _Function]:
    """Turn a function into an operation. Its first argument, if any, is the owner.

    Args:
        operation: The name of the operation.
        begin: Function that is called first, as ``begin(call)``. It may return an object whose
            attribute ``inside`` is the call until the call ends.
        fail: Function that is called as ``fail(call, begun, error, function, args, kwargs)`` after
            an error; ``begun`` is the result of ``begin``, or ``None``. It may raise a better
            error.
    """
    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:  # faster if `args` is passed unchanged
            thread = local.thread
            call = Call()
            call.operation = operation
            if args:
                call.owner = args[0]
            call.outer = outer = thread.innermost
            call.number = 0  # as in the class, but faster to read
            exclusive = None
            try:
                thread.innermost = call
                if begin is not None:
                    exclusive = begin(call)
                if not thread.instruments:
                    return function(*args, **kwargs) if kwargs else function(*args)
                # Not in a separate function, because warnings count the frames up to user code.
                observers, result, failure = [*thread.instruments], None, None
                for each in observers:
                    each.begin(call)
                try:
                    result = function(*args, **kwargs)
                except BaseException as raised:
                    failure = raised
                    raise
                finally:
                    for each in observers:
                        each.end(call, args, kwargs, result, failure)
                return result
            except BaseException as error:
                if fail is not None:
                    fail(call, exclusive, error, function, args, kwargs)
                raise
            finally:
                if exclusive is not None:
                    exclusive.inside = None
                thread.innermost = outer
                call.owner = None

        return cast(_Function, run)

    return decorate


def subscribe(instrument: Instrument) -> None:
    """Notify an instrument of all calls from now on. A second subscription has no effect."""
    instruments = runtime.get(_Threads).instruments
    if instrument not in instruments:
        instruments.append(instrument)


def unsubscribe(instrument: Instrument) -> None:
    """Undo :func:`subscribe`."""
    instruments = runtime.get(_Threads).instruments
    if instrument in instruments:
        instruments.remove(instrument)


def of_thread(ident: int) -> list[Call]:
    """Return the calls that a thread is in, innermost first."""
    thread = runtime.get(_Threads).threads.get(ident)
    call = None if thread is None else thread.innermost
    found = []
    while call is not None:
        found.append(call)
        call = call.outer
    return found


def thread_of(call: Call) -> int | None:
    """Return the identifier of the thread that is in a call; ``None`` if the call is over."""
    return next((ident for ident in threads() if call in of_thread(ident)), None)


def threads() -> frozenset[int]:
    """Return the identifiers of the threads that have used an operation."""
    return frozenset(runtime.get(_Threads).threads.keys())


def outermost() -> str:
    """Return the name of the outermost operation that the calling thread is in, or ''."""
    call, name = local.thread.innermost, ''
    while call is not None:
        name, call = call.operation, call.outer
    return name
