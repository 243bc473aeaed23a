"""Selects the rank that prints an uncaught error, and the frames that it shows.

If all ranks raise an error, only one rank prints it. If Chainer's Trainer has already printed an
error, the report of the job shows it in one line. If this package raises an error to explain a
mistake in user code, only the frames of user code are printed. A note can add the place in the
model.
"""
from __future__ import annotations

import dis
import os
from collections.abc import Iterator, Sequence
from types import TracebackType

from chainermn._process import environment
from chainermn._process.program_place import OURS, PACKAGES

_RAISE = dis.opmap['RAISE_VARARGS']
_ATTRIBUTE = '_chainermn_is_printed_here'
_SHOWN = '_chainermn_is_shown'
_COMPLETE = '_chainermn_is_complete'


def mark(error: Exception, is_printed_here: bool) -> None:
    """Note that all ranks of a communicator raise an error.

    Args:
        error: The error.
        is_printed_here: Whether this rank prints the error if it is not caught.
    """
    error.__dict__[_ATTRIBUTE] = is_printed_here


def mark_failure(error: Exception, rank: int, failures: Sequence[object]) -> None:
    """Note that all ranks of a communicator raise an error; the first failed rank prints it.

    Args:
        error: The error.
        rank: This rank.
        failures: The failure of each rank, if any. If no rank failed, rank 0 prints the error.
    """
    mark(error, rank == next((each for each, failure in enumerate(failures) if failure), 0))


def mark_complete(error: Exception) -> None:
    """Note that an error gives the rank and the operation that failed."""
    error.__dict__[_COMPLETE] = True


def is_complete(error: BaseException) -> bool:
    """Return whether an error gives the rank and the operation that failed."""
    return getattr(error, _COMPLETE, False)


def is_common(error: BaseException | None) -> bool:
    """Return whether all ranks raise this error."""
    return getattr(error, _ATTRIBUTE, None) is not None


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then its cause or context, then the cause or context of that, and so on."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def is_printed_here(error: BaseException) -> bool:
    """Return whether this rank prints an error if it is not caught."""
    return getattr(error, _ATTRIBUTE, True)


def add_note(error: BaseException, note: str) -> None:
    """Add a line to an error.

    Like ``BaseException.add_note`` of Python 3.11. On Python 3.10, where Python prints no notes,
    only the other ranks show the line.
    """
    error.__dict__['__notes__'] = [*getattr(error, '__notes__', ()), note]


def mark_shown(error: BaseException) -> None:
    """Note that this rank has printed the message and the traceback, but no chained errors."""
    error.__dict__[_SHOWN] = not (
        error.__cause__ or error.__context__ or getattr(error, '__notes__', None))


def is_shown(error: BaseException) -> bool:
    """Return whether this rank has printed an error completely."""
    return getattr(error, _SHOWN, False)


def hide_frames(error: BaseException) -> None:
    """Remove the frames of this package and of Chainer from the tracebacks of certain errors.

    This applies to errors that explain a mistake (including Chainer's InvalidType) and to errors
    that all ranks raise. It also applies to errors in user code that caused them, such as an error
    in the ``transform`` of a sample.

    ``CHAINERMN_DEBUG=1`` shows all frames.
    """
    if not _explains(error):
        return
    error.__traceback__ = _visible(error.__traceback__) or error.__traceback__
    for each in (*chain(error),)[1:]:
        innermost = _innermost(each.__traceback__)
        if innermost is not None and not innermost.tb_frame.f_code.co_filename.startswith(PACKAGES):
            each.__traceback__ = _visible(each.__traceback__)


def program_line(error: BaseException) -> str:
    """Return the innermost line of user code that an error passed through, or ''."""
    place, tb = '', error.__traceback__
    while tb is not None:
        path = tb.tb_frame.f_code.co_filename
        if not path.startswith(PACKAGES):
            place = f'{os.path.basename(path)}:{tb.tb_lineno}'
        tb = tb.tb_next
    return place


def visible_frames(error: BaseException) -> TracebackType | None:
    """Return the frames that :func:`hide_frames` leaves; ``None`` if it changes nothing."""
    return _visible(error.__traceback__) if _explains(error) else None


def _explains(error: BaseException) -> bool:
    # Imported here, because a rank that cannot import Chainer imports this module to report that.
    from chainer.utils.type_check import InvalidType

    return not environment.flag(environment.DEBUG) and (
        is_common(error) or isinstance(error, InvalidType) or _is_raised_here(error))


def _is_raised_here(error: BaseException) -> bool:
    """Return whether a ``raise`` statement of this package raised an error.

    All other errors may be bugs of this package, so their frames are kept.
    """
    tb = _innermost(error.__traceback__)
    if tb is None or isinstance(error, AssertionError):
        return False
    code = tb.tb_frame.f_code
    return (code.co_filename.startswith(OURS) and tb.tb_lasti >= 0
            and code.co_code[tb.tb_lasti] == _RAISE)


def _innermost(tb: TracebackType | None) -> TracebackType | None:
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb


def _visible(tb: TracebackType | None) -> TracebackType | None:
    frames = []
    while tb is not None:
        if not tb.tb_frame.f_code.co_filename.startswith(PACKAGES):
            frames.append(tb)
        tb = tb.tb_next
    visible = None
    for each in reversed(frames):
        visible = TracebackType(visible, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return visible
