"""Callbacks that run once all ranks have reached the end of the script without an error."""
from __future__ import annotations

from collections.abc import Callable

from chainermn._process import runtime


class _Callbacks(runtime.ProcessState):
    def __init__(self) -> None:
        self.functions: list[Callable[[], None]] = []


def add(callback: Callable[[], None]) -> None:
    """Add a function, which runs before MPI is finalized and must not raise an error.

    Without consistency checks, it may run on this rank even if another rank fails later.
    """
    runtime.get(_Callbacks).functions.append(callback)


def remove(callback: Callable[[], None]) -> None:
    """Undo :func:`add`."""
    functions = runtime.get(_Callbacks).functions
    if callback in functions:
        functions.remove(callback)


def run() -> None:
    """Call the functions in the order in which they were added."""
    functions = runtime.get(_Callbacks).functions
    while functions:
        functions.pop(0)()
