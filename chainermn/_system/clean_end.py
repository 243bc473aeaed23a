"""Functions that run once all ranks have reached the end of the program without an error."""
from __future__ import annotations

from collections.abc import Callable

_callbacks: list[Callable[[], None]] = []


def add(callback: Callable[[], None]) -> None:
    """Add a function.  It runs before MPI is finalized, and must not raise an error.

    Without consistency checks, it may run on this rank although another rank fails later.
    """
    _callbacks.append(callback)


def remove(callback: Callable[[], None]) -> None:
    """Undo :func:`add`."""
    if callback in _callbacks:
        _callbacks.remove(callback)


def run() -> None:
    """Call the functions in the order in which they were added."""
    while _callbacks:
        _callbacks.pop(0)()
