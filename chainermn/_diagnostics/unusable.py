"""What can no longer be used raises, instead of waiting for ranks that will not come.

That is a communicator that was finalized, every communicator once the program has ended,
and every one in a forked child, which is no rank.
"""
from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

from chainermn import _forked
from chainermn._diagnostics import call_site

# Functions through which every operation passes, whatever its name.
_PASS_ON = {(call_site.PACKAGE + os.path.join('_collectives', 'operation.py'), 'operation'),
            (call_site.PACKAGE + os.path.join('_collectives', 'traced.py'), 'timed'),
            (call_site.PACKAGE + os.path.join('_collectives', 'traced.py'), 'spanned')}

_SHUT_DOWN = (
    'the communicators of this rank were shut down at the end of the program, so it cannot reach '
    'the other ranks any more. Call it earlier, on every rank: in the main program, or in a '
    'function that is registered with atexit after the first communicator was created')
_FORKED = (
    'this process was forked from the rank in process {}, and is no rank itself, so it cannot use '
    'a communicator. Call it in that process, and exchange data with this one by other means, such '
    'as a multiprocessing.Queue')


class Unusable:
    """Stands for what an object no longer has.  Whatever it is asked for, it says why."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(f'{_operation()}: {self._why}')

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError(f'{_operation()}: {self._why}')


class _GivesUp(Protocol):
    def give_up(self, unusable: Unusable) -> None:
        """Puts that in place of all by which this object reaches other ranks."""


_known: weakref.WeakSet[_GivesUp] = weakref.WeakSet()
_unusable: Unusable | None = None


def know(user: _GivesUp) -> None:
    """Makes a user of MPI known, which gives up when the program ends or this process is forked."""
    _known.add(user)


def forget(user: _GivesUp) -> None:
    """Undoes :func:`know`."""
    _known.discard(user)


def shut_down() -> None:
    """Lets all communicators of this process raise from now on, at the end of the program."""
    _give_up(_SHUT_DOWN)


def check(operation: str) -> None:
    """Raises if no communicator can be made any more."""
    if _forked.parent:
        _in_child()
    if _unusable is not None:
        raise RuntimeError(f'{operation}: {_unusable._why}')


def _in_child() -> None:
    if _forked.parent:
        _give_up(_FORKED.format(_forked.parent))


def _give_up(why: str) -> None:
    global _unusable
    _unusable = Unusable(why)
    for user in list(_known):
        user.give_up(_unusable)


def _operation() -> str:
    """The name of the operation that is being called."""
    frame, name = sys._getframe(2), ''
    while frame is not None and frame.f_code.co_filename.startswith(call_site.LAYERS):
        if (frame.f_code.co_filename, frame.f_code.co_name) not in _PASS_ON:
            name = frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    return name


# After that of _forked.
os.register_at_fork(after_in_child=_in_child)
