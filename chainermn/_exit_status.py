"""How this process ends, as the interpreter itself knows it, whatever hooks a program installs.

Only the interpreter knows that nobody caught an exception.  A program can replace
``sys.excepthook`` at any time, and no hook is called for :class:`SystemExit`.  But the interpreter
raises the auditing event ``sys.excepthook`` before it calls that hook, and it reads
``SystemExit.code``.  Both happen while no Python function runs.
"""
from __future__ import annotations

import atexit
import ctypes
import gc
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn


class Outcome:
    """How the process ends, and whom to tell as soon as that is known."""

    def __init__(self) -> None:
        #: The exit status; of a process that a signal ends, its number with the sign changed.
        self.status = 0
        #: Called when nobody caught an exception: with ``sys.excepthook`` and its arguments.
        self.uncaught: Callable[..., object] | None = None
        #: Called when one cannot be raised: with ``sys.unraisablehook`` and its argument.
        self.unraisable: Callable[[Any, Any], object] | None = None
        #: Called when nobody caught a SystemExit: with its code; returns the code to exit with.
        self.exits: Callable[[Any], Any] | None = None


outcome = Outcome()
_is_listening = False


def listen() -> None:
    """Keeps ``outcome`` up to date from now on, also in forked children."""
    global _is_listening
    if _is_listening:
        return
    _is_listening = True
    sys.addaudithook(_audit)
    # The interpreter reads this attribute of a class to which Python code cannot assign.
    attributes, = gc.get_referents(vars(SystemExit))
    member = attributes['code']

    def code_of(error: SystemExit) -> Any:
        code = member.__get__(error)
        return _exits_with(code) if _is_called_by_the_interpreter() else code

    def replace(descriptor: Any) -> None:
        attributes['code'] = descriptor
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))

    replace(property(code_of, member.__set__, member.__delete__))
    atexit.register(replace, member)  # before what the property needs is gone
    if sys.version_info < (3, 12):
        sys.exit = _exit


def status_of(code: Any) -> int:
    """The status with which ``SystemExit(code)`` asks to exit, of any size."""
    return int(code) if isinstance(code, int) else int(code is not None)


def in_8_bits(status: int) -> int:
    """A status as the system keeps it, but never 0 unless it is 0."""
    return status and (status & 0xff or 1)


def _exit(status: Any = None, /) -> NoReturn:
    """Exit the interpreter; what sys.exit does, but with an exception that is asked for its code.

    Before Python 3.12, that of sys.exit itself is a class and a number until it is caught.
    """
    raise status if isinstance(status, SystemExit) else SystemExit(status)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == 'sys.excepthook':
        if _is_called_by_the_interpreter():
            if threading.current_thread() is threading.main_thread():
                is_interrupt = issubclass(arguments[1], KeyboardInterrupt)
                outcome.status = -signal.SIGINT if is_interrupt else 1
            if outcome.uncaught is not None:
                outcome.uncaught(*arguments)
    elif event == 'sys.unraisablehook' and outcome.unraisable is not None:
        outcome.unraisable(*arguments)


def _exits_with(code: Any) -> Any:
    outcome.status = status_of(code) & 0xff
    return code if outcome.exits is None else outcome.exits(code)


def _is_called_by_the_interpreter() -> bool:
    """Whether no Python function runs but the one that asks."""
    try:
        sys._getframe(2)
    except ValueError:
        return True
    return False
