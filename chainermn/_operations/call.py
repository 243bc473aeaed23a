"""A call: one operation of one thread, from its beginning to its end.

:func:`entered` makes a function an operation, and nothing else begins a call that a thread is in.
The flight recorder keeps the last calls of a communicator, and adds one for each further exchange
of an operation. The watchdog reads the calls that each thread is in, errors name them, and an
:class:`Instrument` such as the timeline is told when one begins and ends.
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

#: The preposition before the peer of an operation: 'from', unless it is here.
_PREPOSITIONS = {**dict.fromkeys(waiting_for(Waits.RECEIVER), 'to'), 'isend': 'to', 'wait': 'for'}


class Call:
    """A call. It has no constructor, which would take as long as everything else about a call.

    Attributes:
        operation: The name of the operation.
        owner: The communicator, or another object with operations; ``None`` once the call is over,
            so that a flight record keeps no communicator alive.
        outer: The call around it in the same thread.
        number: Its number in the flight record, from 1; 0 if it is not recorded (yet).
        signature: What the ranks compare.
        header: Of a message, if it was recorded.
        peer: Of a message, negative for any rank.
        tag: Of a message, negative for any tag.
        words: More about it, for reports.
        asked: The ranks in COMM_WORLD that a request of a service goes to.
        place: The code and the instruction of the program that called it, if it is known.
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
        """Its arguments, in words."""
        parts = []
        if self.peer is not None and self.tag is not None:
            parts = [_PREPOSITIONS.get(self.operation, 'from'),
                     'any rank' if self.peer < 0 else f'rank {self.peer}',
                     'any tag' if self.tag < 0 else f'tag {self.tag}']
        if self.signature is not None:
            parts.append(call_signature.unpack(self.signature).arguments)
        if self.header is not None:
            parts.append(message_header.read(self.header)[0].arguments)
        return ' '.join(filter(None, [*parts, self.words]))

    @property
    def text(self) -> str:
        """Operation, number and details."""
        return f'{self.operation} #{self.number} {self.details}'.rstrip()

    @property
    def site(self) -> str:
        """File and line of the program that called it, if they are known."""
        if self.place is None:
            return ''
        code, instruction = self.place
        line = next((line for start, end, line in code.co_lines()
                     if start <= instruction < end), None)
        return f'{os.path.basename(code.co_filename)}:{line or code.co_firstlineno}'


# CPython stores attributes in an array instead of a dict if the first object of a class has them.
_first = Call()
for _name in Call.__annotations__:
    setattr(_first, _name, getattr(Call, _name))


class Instrument(Protocol):
    """Is told of the calls of all threads."""

    def begin(self, call: Call) -> None:
        """Note that a call begins."""

    def end(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], result: object,
            error: BaseException | None) -> None:
        """Note that a call ends.

        Args:
            call: The call.
            args: The arguments of the function; its owner is the first.
            kwargs: The arguments by name.
            result: Its result.
            error: The error that it raised, or ``None``.
        """


class Thread:
    """A thread: the innermost call that it is in."""

    __slots__ = '__weakref__', 'innermost', 'instruments'

    def __init__(self, instruments: list[Instrument]) -> None:
        self.innermost: Call | None = None
        self.instruments = instruments


class _Threads(runtime.ProcessState):
    """The threads of this process with operations, and the instruments that are told of them."""

    def __init__(self) -> None:
        # Thread identifiers are reused; the objects end with their threads.
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
    """Make a function an operation. Its owner is its first argument, if any.

    Args:
        operation: The name of the operation.
        begin: Called first, as ``begin(call)``; may return an object whose ``inside`` is the call
            until its end.
        fail: Called as ``fail(call, begun, error, function, args, kwargs)`` with what ``begin``
            returned, or ``None``; may raise a better error.
    """
    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:  # passing on `args` as it is is faster
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
                # Here, not in a function: warnings count the frames to the program.
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
    """Tell an instrument, once, of all calls from now on."""
    instruments = runtime.get(_Threads).instruments
    if instrument not in instruments:
        instruments.append(instrument)


def unsubscribe(instrument: Instrument) -> None:
    """Undo :func:`subscribe`."""
    instruments = runtime.get(_Threads).instruments
    if instrument in instruments:
        instruments.remove(instrument)


def of_thread(ident: int) -> list[Call]:
    """Return the calls that a thread is in, the innermost first."""
    thread = runtime.get(_Threads).threads.get(ident)
    call = None if thread is None else thread.innermost
    found = []
    while call is not None:
        found.append(call)
        call = call.outer
    return found


def thread_of(call: Call) -> int | None:
    """Return the identifier of the thread that is in a call; ``None`` if it is over."""
    return next((ident for ident in threads() if call in of_thread(ident)), None)


def threads() -> frozenset[int]:
    """Return the identifiers of the threads that have used an operation."""
    return frozenset(runtime.get(_Threads).threads.keys())


def outermost() -> str:
    """Return the name of the operation that the calling thread is in; '' if it is in none."""
    call, name = local.thread.innermost, ''
    while call is not None:
        name, call = call.operation, call.outer
    return name
