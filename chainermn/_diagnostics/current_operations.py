"""The current operations of each thread: their wrappers record them, the watchdog reads them."""
from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, cast

from chainermn._diagnostics.flight_recorder import FlightRecord

_Function = TypeVar('_Function', bound=Callable[..., Any])

#: A running operation: its name, its owner (see :class:`Owner`), and the operation around it.
#: Every call of an operation makes one, so it is a plain tuple.
Entry: TypeAlias = 'tuple[str, Any, Entry | None]'


class Owner(Protocol):
    """A communicator or another object with operations."""

    def _flight_records(self) -> tuple[FlightRecord, ...]:
        """Return the flight records of its operations."""


class Thread:
    """The operations of one thread.

    A wrapper sets ``innermost`` at the beginning of its operation, and back at the end.
    """

    __slots__ = '__weakref__', 'innermost'

    def __init__(self) -> None:
        self.innermost: Entry | None = None


# Thread identifiers are reused; the objects end with their threads.
_threads: weakref.WeakValueDictionary[int, Thread] = weakref.WeakValueDictionary()


class _Local(threading.local):
    def __init__(self) -> None:
        self.thread = _threads[threading.get_ident()] = Thread()


#: ``local.thread`` is the calling thread.
local = _Local()


def recorded(name: str) -> Callable[[_Function], _Function]:
    """Make a function an operation.  Its owner is its first argument, if any."""
    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def operation(*args: Any, **kwargs: Any) -> Any:
            thread = local.thread
            outer = thread.innermost
            try:
                thread.innermost = name, args[0] if args else None, outer
                return function(*args, **kwargs)
            finally:
                thread.innermost = outer

        return cast(_Function, operation)

    return decorate


class CurrentOperation(NamedTuple):
    """A running operation, and the flight records of its owner."""

    name: str
    calls: tuple[FlightRecord, ...]


def of_thread(ident: int) -> list[CurrentOperation]:
    """Return the operations that a thread is in, the innermost first."""
    thread = _threads.get(ident)
    entry = None if thread is None else thread.innermost
    found = []
    while entry is not None:
        name, owner, entry = entry
        calls: tuple[FlightRecord, ...] = ()
        with contextlib.suppress(Exception):  # it may be finalized by now, or have no records
            calls = tuple(owner._flight_records())
        found.append(CurrentOperation(name, calls))
    return found


def is_inside(thread: Thread, owner: object) -> bool:
    """Return whether a thread is in an operation of an owner."""
    entry = thread.innermost
    while entry is not None:
        if entry[1] is owner:
            return True
        entry = entry[2]
    return False


def ident_of(thread: Thread) -> int | None:
    """Return the identifier of a thread; ``None`` if it has ended."""
    return next((ident for ident, each in _threads.items() if each is thread), None)


def threads() -> frozenset[int]:
    """Return the identifiers of the threads that have used an operation."""
    return frozenset(_threads.keys())


def outermost() -> str:
    """Return the name of the operation that the calling thread is in; '' if it is in none."""
    entry, name = local.thread.innermost, ''
    while entry is not None:
        name, _, entry = entry
    return name
