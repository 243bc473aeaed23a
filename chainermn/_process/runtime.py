"""The runtime: all state of this process. A forked child keeps or replaces each part of it.

A module that needs such state defines a subclass of :class:`ProcessState` and gets the object of
this process with ``runtime.get(subclass)``. So forks are handled in one place, in the order in
which the objects were created, and a test can replace everything with a second :class:`Runtime`.
"""
from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TypeVar, cast


class ProcessState:
    """The state of one module, created without arguments when it is first needed."""

    def in_child(self) -> bool:
        """Return whether a forked child keeps this object; by default, the child gets a new one.

        This method is called in the child.
        """
        return False


_P = TypeVar('_P', bound=ProcessState)


class Runtime:
    """The state objects of one process."""

    def __init__(self) -> None:
        self._parts: dict[type[ProcessState], ProcessState] = {}
        self._of_parent: list[ProcessState] = []  # kept alive: no destructor must run in a child

    def get(self, kind: type[_P]) -> _P:
        """Return the instance of a class; the first call creates it."""
        part = self._parts.get(kind)
        if part is None:
            part = self._parts.setdefault(kind, kind())
        return cast(_P, part)

    def in_child(self) -> None:
        """Prepare a forked child."""
        for kind, part in list(self._parts.items()):
            if not part.in_child():
                self._of_parent.append(self._parts.pop(kind))


_current = Runtime()


def get(kind: type[_P]) -> _P:
    """Return this process's instance of a class."""
    return _current.get(kind)


@contextlib.contextmanager
def replaced() -> Iterator[Runtime]:
    """Return a context that uses a second runtime, for tests."""
    global _current
    before, _current = _current, Runtime()
    try:
        yield _current
    finally:
        _current = before


os.register_at_fork(after_in_child=lambda: _current.in_child())
