"""The runtime: all state that belongs to this process, and the part that a forked child gets.

A module that needs such state defines a :class:`ProcessState`, and gets the one of this process by
``runtime.get(its_class)``. So a fork is handled in one place, in the order in which the parts were
created, and a test can replace everything by a second :class:`Runtime`.
"""
from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TypeVar, cast


class ProcessState:
    """The state of one module. Created without arguments, when it is first needed."""

    def in_child(self) -> bool:
        """Return whether a forked child keeps this object; by default, it gets a new one.

        Called in the child.
        """
        return False


_P = TypeVar('_P', bound=ProcessState)


class Runtime:
    """The parts of one process."""

    def __init__(self) -> None:
        self._parts: dict[type[ProcessState], ProcessState] = {}
        self._of_parent: list[ProcessState] = []  # whose destructors must not run in a child

    def get(self, kind: type[_P]) -> _P:
        """Return the part of a class."""
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
    """Return the part of a class of this process."""
    return _current.get(kind)


@contextlib.contextmanager
def replaced() -> Iterator[Runtime]:
    """Return a context with a second runtime, for tests."""
    global _current
    before, _current = _current, Runtime()
    try:
        yield _current
    finally:
        _current = before


os.register_at_fork(after_in_child=lambda: _current.in_child())
