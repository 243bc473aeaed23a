"""Detects how this process ends, independently of hooks that user code installs.

Only the interpreter knows that an exception is uncaught. User code can replace
``sys.excepthook`` at any time, and no hook is called for :class:`SystemExit`. But the interpreter
raises the audit event ``sys.excepthook`` before it calls that hook, and reads
``SystemExit.code``. In both cases no Python function is running.
"""
from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import NoReturn, TypeAlias, cast

from chainermn._process import runtime
from chainermn._process.program_place import PACKAGES

#: Name of the attribute for the line that called sys.exit. Before Python 3.12, the exception has no
#: traceback when the interpreter reads its code.
_PLACE = '_chainermn_place'
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
#: The code of a SystemExit: usually an integer, a message or None.
Code: TypeAlias = object


class Outcome(runtime.ProcessState):
    """The outcome of the process, and callbacks for when it is known."""

    def __init__(self) -> None:
        #: The exit status, or the negative number of the signal that ended the process.
        self.status = 0
        #: Called for an uncaught exception with ``sys.excepthook`` and its arguments.
        self.uncaught: Callable[..., object] | None = None
        #: Called for an unraisable exception with ``sys.unraisablehook`` and its argument.
        self.unraisable: Callable[..., object] | None = None
        #: Called for an uncaught SystemExit with its code; returns the code to exit with.
        self.exits: Callable[[Code], Code] | None = None
        #: Line of user code that raised the uncaught SystemExit, such as ``train.py:8``, or ''.
        self.place = ''
        #: Whether :func:`listen` updates this object.
        self.is_updated = False

    def in_child(self) -> bool:
        return True


def outcome() -> Outcome:
    """Return the outcome of this process."""
    return runtime.get(Outcome)


def listen() -> None:
    """Start updating ``outcome()``, including in forked children."""
    if outcome().is_updated:
        return
    outcome().is_updated = True
    sys.addaudithook(_audit)
    # SystemExit is immutable for Python code, so replace the descriptor in its dictionary.
    attributes, = gc.get_referents(vars(SystemExit))
    member = attributes['code']

    def code_of(error: SystemExit) -> Code:
        code = member.__get__(error)
        if not _is_called_by_the_interpreter():
            return code
        outcome().place = _place(error)
        return _exits_with(code)

    def replace(descriptor: object) -> None:
        attributes['code'] = descriptor
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))

    replace(property(code_of, member.__set__, member.__delete__))
    atexit.register(replace, member)  # the interpreter later clears names that the property needs
    if sys.version_info < (3, 12):
        sys.exit = _exit


def status_of(code: Code) -> int:
    """Return the exit status of ``SystemExit(code)``, before truncation to 8 bits.

    Args:
        code: The code.
    """
    return int(code) if isinstance(code, int) else int(code is not None)


def in_8_bits(status: int) -> int:
    """Truncate a status to 8 bits, but keep nonzero values nonzero.

    Args:
        status: An exit status.
    """
    return status and (status & 0xff or 1)


def _exit(status: Code = None, /) -> NoReturn:
    """Exit the interpreter: like sys.exit, but raise a SystemExit instance.

    Before Python 3.12, sys.exit sets a class and a value, and creates the instance only when the
    exception is caught, so ``code`` would not be read.
    """
    error = status if isinstance(status, SystemExit) else SystemExit(status)
    vars(error)[_PLACE] = next(_places(traceback.walk_stack(sys._getframe())), '')
    raise error


def _place(error: SystemExit) -> str:
    """Return the innermost line of user code that raised an exception; '' if that is unknown."""
    places = [*_places(traceback.walk_tb(error.__traceback__))]
    return places[-1] if places else vars(error).get(_PLACE, '')


def _places(frames: Iterable[tuple[FrameType, int]]) -> Iterator[str]:
    """Yield the lines of user code among frames, such as ``train.py:8``."""
    for frame, line in frames:
        path = frame.f_code.co_filename
        if not path.startswith(PACKAGES) and (
                not path.startswith(_STANDARD_LIBRARY) or 'site-packages' in path):
            yield f'{os.path.basename(path)}:{line}'


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if outcome is None:  # when the interpreter has deleted this module
        return
    if event == 'sys.excepthook':
        if _is_called_by_the_interpreter():
            if threading.current_thread() is threading.main_thread():
                is_interrupt = issubclass(cast(type, arguments[1]), KeyboardInterrupt)
                outcome().status = -signal.SIGINT if is_interrupt else 1
            if (uncaught := outcome().uncaught) is not None:
                uncaught(*arguments)
    elif event == 'sys.unraisablehook' and (unraisable := outcome().unraisable) is not None:
        unraisable(*arguments)


def _exits_with(code: Code) -> Code:
    current = outcome()
    current.status = status_of(code) & 0xff
    return code if current.exits is None else current.exits(code)


def _is_called_by_the_interpreter() -> bool:
    """Return whether no Python function is running except the caller."""
    try:
        sys._getframe(2)
    except ValueError:
        return True
    return False
