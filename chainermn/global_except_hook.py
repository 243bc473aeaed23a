"""Ends the whole job when one of its processes fails.

MPI processes wait for each other, so one that ends early leaves the others waiting for ever, and
waits itself in MPI_Finalize for them. ``import chainermn`` therefore sees to it that a process
that fails prints which rank it is and why, and ends all others (MPI_Abort); ``mpiexec`` returns an
error. A process fails by an exception that nobody catches, in any thread or in a function of
``atexit``, by ``sys.exit`` with a status other than 0, or by ``os._exit``. What ends a process
without a word of its own, such as a signal or ``raise SystemExit(1)``, is told by another process,
from the first communicator on (see ``communicators/_witness.py``). What happens before this module
is imported is told by ``mpiexec`` alone.

A process that is not one of several MPI processes fails as any Python program does.

``CHAINERMN_FORCE_ABORT_ON_EXCEPTIONS=1`` calls :func:`add_hook` at import; ``=0`` switches all of
this off, for a debugger's or a notebook's own hooks. ``..._ON_EXCEPTION`` means the same.
"""
from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NoReturn

_VARIABLES = ('CHAINERMN_FORCE_ABORT_ON_EXCEPTIONS', 'CHAINERMN_FORCE_ABORT_ON_EXCEPTION')

#: Names the folder in which ``python -m chainermn run`` looks for why ranks have failed.
FOLDER = 'CHAINERMN_RUN_FOLDER'

# Seconds. mpiexec drops what it has not read from a process when that process ends the job.
_FORWARDED_WITHIN = 0.5
# Seconds that mpiexec may take to end this process.
_ENDED_WITHIN = 10

_os_exit = os._exit
_forced = False  # whether to end the job even if this process is all of it
_installed_by = 0  # our process id, once the hooks are in place; a forked child has another
_before: dict[str, Any] = {}  # the hooks that were in place before ours
_exit_status = 0  # what the process ends with, once it is known
#: Says whether this process is the first to say why the job ends; the others follow from it.
may_speak: Callable[[], bool] | None = None
#: Called instead of ending the job, if somebody else sees to that, with why and a longer text.
instead: Callable[[str, str], Any] | None = None


def add_hook() -> None:
    """Ends the job on failure also if this is its only process.

    Several processes need no call: ``import chainermn`` is enough. A second call has no effect.
    """
    global _forced
    if _forced:
        warnings.warn('chainermn.global_except_hook.add_hook() was called before, or '
                      f'{_VARIABLES[0]} is set; this call has no effect.', stacklevel=2)
        return
    _forced = True
    _install()


def _add_hook_if_enabled() -> None:
    value = next((os.environ[name] for name in _VARIABLES if name in os.environ), None)
    if value is None:
        _install()
    elif value.lower() not in ('', '0', 'false', 'no', 'off'):
        add_hook()


def leave_word(text: str) -> None:
    """Tells ``python -m chainermn run``, if that started the job, why a rank of it ends."""
    folder = os.environ.get(FOLDER)
    if folder is not None:
        with contextlib.suppress(OSError):  # there is none on another machine
            path = f'{folder}/{time.time_ns()}-{os.getpid()}'
            with open(f'{path}.part', 'w') as file:
                file.write(text)
            os.rename(f'{path}.part', f'{path}.txt')


def ends_the_job() -> bool:
    """Whether a process that fails ends the others, and nobody else sees to that."""
    return _installed_by == os.getpid() and instead is None


def is_failing() -> bool:
    """Whether the process is about to end with an error."""
    return _exit_status != 0


def _install() -> None:
    global _installed_by
    if _installed_by:
        return
    _installed_by = os.getpid()
    _before.update(sys=sys.excepthook, threading=threading.excepthook, exit=sys.exit,
                   unraisable=sys.unraisablehook)
    sys.excepthook = _global_except_hook
    threading.excepthook = _thread_except_hook
    sys.unraisablehook = _unraisable_hook
    sys.exit = _exit
    os._exit = _exit_at_once
    atexit.register(_at_exit)


def _global_except_hook(
    exc_type: type[BaseException], value: BaseException, tb: TracebackType | None
) -> None:
    text = ''
    if _before['sys'] is sys.__excepthook__:
        # Written by us, at once, so that the tracebacks of several processes do not mix.
        with contextlib.suppress(MemoryError, RecursionError):
            text = ''.join(traceback.format_exception(exc_type, value, tb))
    with _ending_the_job(f'uncaught {exc_type.__name__}', text=text) as is_written:
        if not is_written:
            _before['sys'](exc_type, value, tb)


def _thread_except_hook(args: threading.ExceptHookArgs) -> None:
    if issubclass(args.exc_type, SystemExit):  # ends the thread only
        return _before['threading'](args)
    name = args.thread.name if args.thread else 'unknown'
    with _ending_the_job(f'uncaught {args.exc_type.__name__} in thread {name}') as is_written:
        if not is_written:
            _before['threading'](args)


def _unraisable_hook(args: sys.UnraisableHookArgs) -> None:
    why, status = f'uncaught {args.exc_type.__name__}', 1
    if isinstance(args.exc_value, SystemExit):
        status = _status_of(args.exc_value)
        why = f'sys.exit with status {status}'
    if status == 0 or 'atexit' not in (args.err_msg or ''):
        return _before['unraisable'](args)  # of a __del__, which Python ignores
    with _ending_the_job(f'{why} in a function of atexit', status) as is_written:
        if not is_written:
            _before['unraisable'](args)


def _status_of(error: SystemExit) -> int:
    code = error.args[0] if error.args else None
    return code if isinstance(code, int) else int(code is not None)


class _SystemExit(SystemExit):
    """Knows when the interpreter asks for its code: then nobody caught it."""

    @property
    def code(self) -> Any:  # type: ignore[override]
        code = self.args[0] if self.args else None
        try:
            sys._getframe(1)
        except ValueError:  # no Python function asks
            global _exit_status
            _exit_status = _status_of(self)
        return code


_SystemExit.__module__, _SystemExit.__qualname__ = 'builtins', 'SystemExit'  # in tracebacks


def _exit(status: Any = None, /) -> NoReturn:
    """Exit the interpreter; what sys.exit does."""
    if threading.current_thread() is threading.main_thread():
        raise _SystemExit(status)
    _before['exit'](status)
    raise AssertionError


def _exit_at_once(status: int) -> NoReturn:
    """Exit to the system with specified status, without normal exit processing."""
    if instead is not None or _way_to_end(1) is None:
        _os_exit(status)
    stack = ''.join(traceback.format_stack(sys._getframe(1)))
    with _ending_the_job(f'os._exit with status {status}', status or 1,
                         f'Stack (most recent call last):\n{stack}'):
        pass
    raise AssertionError


def _at_exit() -> None:
    if _exit_status:
        with _ending_the_job(f'sys.exit with status {_exit_status}', _exit_status):
            pass


def end_the_job(why: str, text: str) -> None:
    """Says why and ends all processes of the job, whatever they are doing; does not return."""
    if instead is not None:
        instead(why, text)
        return
    mpi = sys.modules['mpi4py.MPI']
    with _ending_the_job(why, text=text, end=lambda: mpi.COMM_WORLD.Abort(1)):
        pass


@contextlib.contextmanager
def _ending_the_job(why: str, status: int = 1, text: str = '',
                    end: Callable[[], Any] | None = None) -> Iterator[bool]:
    """Names this process, runs the body, and does not return if the job has to end.

    Yields whether nothing else is to be written.
    """
    end = _way_to_end(status) if end is None else end
    if end is None:
        yield False
        return
    try:
        _flush()
        if may_speak is not None and not may_speak():
            yield True
            time.sleep(_ENDED_WITHIN)
            return
        said = f'{_who()} ends the job: {why}'
        leave_word(said)
        sys.stderr.write(f'chainermn: {said}\n{text}')
        sys.stderr.flush()
        yield bool(text)
    finally:
        _flush()
        time.sleep(_FORWARDED_WITHIN)
        for path in shared_memory():
            with contextlib.suppress(OSError):
                os.unlink(path)
        end()
        # MPICH's MPI_Abort can return before mpiexec has ended this process, which must not go on.
        time.sleep(_ENDED_WITHIN)
        _os_exit(status)


def shared_memory() -> set[str]:
    """The files of this process that MPICH removes at an ordinary end only."""
    with contextlib.suppress(OSError), open('/proc/self/maps', encoding='utf-8') as file:
        return {path for path in (line.split(None, 5)[-1].rstrip('\n') for line in file)
                if path.startswith('/dev/shm/mpich_shm_') and ' ' not in path}
    return set()


def _way_to_end(status: int) -> Callable[[], Any] | None:
    """How to end all processes of the job; ``None`` if there are no others."""
    if os.getpid() != _installed_by:
        return None  # a forked child, such as a worker of MultiprocessIterator, is no rank
    # Not imported here: importing it starts MPI, which waits for the other processes.
    mpi = sys.modules.get('mpi4py.MPI')
    if mpi is not None and mpi.Is_initialized():
        if mpi.Is_finalized() or not (_forced or mpi.COMM_WORLD.size > 1):
            return None
        return lambda: mpi.COMM_WORLD.Abort(status)
    if _is_started_by_hydra():
        # Before MPI has started, MPICH's mpiexec does not mind a process that exits with an
        # error, while the others wait for it in MPI_Init. It minds one that a signal ends.
        return lambda: os.kill(os.getpid(), signal.SIGKILL)  # others can be caught
    return None


def _is_started_by_hydra() -> bool:
    try:
        # A program that a rank started has the variables too, but not the open pipe.
        os.fstat(int(os.environ['PMI_FD']))
        return int(os.environ['PMI_SIZE']) > 1
    except (KeyError, ValueError, OSError):
        return False


def _who() -> str:
    mpi = sys.modules.get('mpi4py.MPI')
    if mpi is not None and mpi.Is_initialized():
        rank, size = mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size
    else:
        rank, size = os.environ['PMI_RANK'], os.environ['PMI_SIZE']
    return f'rank {rank} of {size} (host {os.uname().nodename}, process {os.getpid()})'


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
