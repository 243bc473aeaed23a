"""Marks on errors that must not be printed twice.

If all ranks raise an error, only one rank prints it, without the frames of this package.  If
Chainer's Trainer has printed an error, the report of the job shows it in one line.
"""
from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from types import TracebackType

from chainermn._process import environment

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INTERNAL = _PACKAGE, contextlib.__file__  # context managers of this package run there
_ATTRIBUTE = '_chainermn_is_printed_here'
_SHOWN = '_chainermn_is_shown'


def mark(error: Exception, is_printed_here: bool) -> None:
    """Note that all ranks of a communicator raise an error.

    Args:
        error: The error.
        is_printed_here: Whether this is the rank that prints it, if it is not caught.
    """
    error.__dict__[_ATTRIBUTE] = is_printed_here


def mark_failure(error: Exception, rank: int, failures: Sequence[object]) -> None:
    """Note that all ranks of a communicator raise an error: the first one that failed prints it.

    Args:
        error: The error.
        rank: This rank.
        failures: For each rank, why it failed, if it did.  If none did, rank 0 prints.
    """
    mark(error, rank == next((each for each, failure in enumerate(failures) if failure), 0))


def is_common(error: BaseException | None) -> bool:
    """Return whether all ranks raise this error."""
    return getattr(error, _ATTRIBUTE, None) is not None


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those from which or during whose handling it was raised."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def is_printed_here(error: BaseException) -> bool:
    """Return whether this rank prints an error, if it is not caught."""
    return getattr(error, _ATTRIBUTE, True)


def mark_shown(error: BaseException) -> None:
    """Note that this rank has printed the message and the traceback, but no chained errors."""
    error.__dict__[_SHOWN] = not (
        error.__cause__ or error.__context__ or getattr(error, '__notes__', None))


def is_shown(error: BaseException) -> bool:
    """Return whether this rank has printed an error completely."""
    return getattr(error, _SHOWN, False)


def hide_frames(error: BaseException) -> None:
    """Remove the frames of this package from the traceback of an error that all ranks raise.

    ``CHAINERMN_DEBUG=1`` shows them.
    """
    if is_common(error) and not environment.flag(environment.DEBUG):
        error.__traceback__ = _visible(error.__traceback__) or error.__traceback__


def _visible(tb: TracebackType | None) -> TracebackType | None:
    frames = []
    while tb is not None:
        if not tb.tb_frame.f_code.co_filename.startswith(_INTERNAL):
            frames.append(tb)
        tb = tb.tb_next
    visible = None
    for each in reversed(frames):
        visible = TracebackType(visible, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return visible
