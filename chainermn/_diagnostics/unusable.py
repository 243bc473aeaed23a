"""Unusable communicators raise an error instead of waiting for ranks that will not come.

A communicator becomes unusable when it is finalized, when the script ends, and in a forked child,
which is not a rank.
"""
from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Iterator
from typing import NoReturn, Protocol

from chainermn._diagnostics import call_site
from chainermn._operations import call
from chainermn._process import forked, runtime

_SHUT_DOWN = (
    'the communicators of this rank were shut down at the end of the script, so this rank can no '
    'longer reach the other ranks. Call the operation earlier, on every rank: in your script, or '
    'in a function that is registered with atexit after the first communicator was created.')
_FINALIZED = (
    'your script has called MPI.Finalize(), so this rank can no longer reach the other ranks. '
    'Remove the call, or move it to the end of the script; mpi4py finalizes MPI when the script '
    'exits.')
_FORKED = (
    'this process was forked from the rank in process {} and is not a rank, so it cannot use a '
    'communicator. Call the operation in that process, and pass data to and from this one by other '
    'means, such as a multiprocessing.Queue.')
#: The reason why a gradient queue whose communicator was freed is unusable.
FREED_QUEUE = (
    'the communicator of this queue was freed; keep a reference to the communicator, and finalize '
    'it only after the last use of the queue')


class Unusable:
    """Replaces an attribute of an unusable object. Any access raises an error with the reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(f'{_operation()}: {self._reason}')

    def __iter__(self) -> Iterator[NoReturn]:
        raise RuntimeError(f'{_operation()}: {self._reason}')


class _MpiUser(Protocol):
    def _make_unusable(self, unusable: Unusable) -> None:
        """Replace all attributes that reach other ranks."""


class _Users(runtime.ProcessState):
    """The registered objects that communicate with other ranks."""

    def __init__(self) -> None:
        forked.parent()  # create its state first, so that a child knows its parent in in_child
        self.registered: weakref.WeakSet[_MpiUser] = weakref.WeakSet()
        self.unusable: Unusable | None = None

    def in_child(self) -> bool:
        if parent := forked.parent():
            self.make_unusable(_FORKED.format(parent))
        return True

    def make_unusable(self, reason: str) -> None:
        self.unusable = Unusable(reason)
        for user in list(self.registered):
            user._make_unusable(self.unusable)


def register(user: _MpiUser) -> None:
    """Register an object that becomes unusable when the script ends or the process is forked."""
    runtime.get(_Users).registered.add(user)


def deregister(user: _MpiUser) -> None:
    """Undo :func:`register`."""
    runtime.get(_Users).registered.discard(user)


def shut_down(is_finalized: bool) -> None:
    """Make all communicators of this process unusable at the end of the script.

    Args:
        is_finalized: Whether user code called MPI.Finalize().
    """
    runtime.get(_Users).make_unusable(_FINALIZED if is_finalized else _SHUT_DOWN)


def check(operation: str) -> None:
    """Raise if communicators can no longer be created."""
    if (unusable := runtime.get(_Users).unusable) is not None:
        raise RuntimeError(f'{operation}: {unusable._reason}')


def _operation() -> str:
    """Return the name of the operation, or of another method, that user code called."""
    if name := call.outermost():
        return name
    inside = itertools.takewhile(
        lambda frame: frame.f_code.co_filename.startswith(call_site.LAYERS),
        call_site.outwards(sys._getframe(2)))
    return [frame.f_code.co_name for frame in inside][-1]

