"""Ends the whole job when one of its processes fails.

MPI processes wait for each other, so one that ends early leaves the others waiting forever, and
waits itself in MPI_Finalize for them. ``import chainermn`` therefore ensures that a process
that fails prints which rank it is and why, and ends all others (MPI_Abort); ``mpiexec`` returns an
error. A process fails by an exception that nobody catches, in any thread or in a function of
``atexit``, by ``sys.exit`` or ``SystemExit`` with a status other than 0, or by ``os._exit``. It
makes no difference which hooks the program installs; they run as well. What ends a process without
a word of its own, such as a signal, is told by another process, from the first communicator on
(see ``_diagnostics/node_monitor.py``). What happens before this module is imported is told by
``mpiexec`` alone.

A process that is not one of several MPI processes fails as any Python program does, except that it
never exits with status 0 when it asked for another one, such as 256.

``CHAINERMN_FORCE_ABORT_ON_EXCEPTIONS=1`` calls :func:`add_hook` at import; ``=0`` switches all of
this off, for a debugger's or a notebook's own hooks. ``..._ON_EXCEPTION`` means the same.
"""
from __future__ import annotations

import atexit
import contextlib
import functools
import operator
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from chainermn import _environment, _exit_status, _streams
from chainermn._exit_status import in_8_bits, status_of

_VARIABLES = _environment.FORCE_ABORT

# Seconds. mpiexec drops what it has not read from a process when that process ends the job.
_FORWARDED_WITHIN = 0.5
# Seconds that mpiexec may take to end this process.
_ENDED_WITHIN = 10

_os_exit = os._exit
_forced = False  # whether to end the job even if this process is all of it
_installed_by = 0  # our process id, once all is in place; a forked child has another
_exit_code = 0  # the exit status that was asked for, of any size, once it is known
_ending_thread: int | None = None  # that has said why the job ends
#: Whether all ranks have reached the end of the program, so that none waits for this one.
is_over = False
#: Says whether this process is the first to say why the job ends; the others follow from it.
may_speak: Callable[[], bool] | None = None
#: Called instead of ending the job, if somebody else sees to that: with why, a longer text, and
#: the exception if there is one.
instead: Callable[[str, str, BaseException | None], Any] | None = None


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
    name = next((name for name in _VARIABLES if name in os.environ), None)
    if name is None:
        _install()
    elif _environment.flag(name):
        add_hook()


def ends_the_job() -> bool:
    """Whether a process that fails ends the others, and nobody else sees to that."""
    return _is_installed() and instead is None


def is_failing() -> bool:
    """Whether the process is about to exit with an error."""
    return _exit_code != 0


def end_the_job(why: str, text: str) -> None:
    """Says why and ends all processes of the job, whatever they are doing; does not return."""
    if instead is not None:
        instead(why, text, None)
        return
    mpi = sys.modules['mpi4py.MPI']
    _end_job(why, text=text, end=lambda: mpi.COMM_WORLD.Abort(1))


def _install() -> None:
    global _installed_by
    if _installed_by:
        return
    _installed_by = os.getpid()
    outcome = _exit_status.outcome
    outcome.uncaught, outcome.unraisable, outcome.exits = _uncaught, _unraisable, _exits
    _exit_status.listen()
    # A new thread gets what it calls with its exception from this function. That looks for
    # threading.excepthook only when it is called.
    make = threading._make_invoke_excepthook  # type: ignore[attr-defined]
    threading._make_invoke_excepthook = (  # type: ignore[attr-defined]
        lambda: functools.partial(_uncaught_in_thread, make()))
    for thread in threading.enumerate():
        thread._invoke_excepthook = functools.partial(  # type: ignore[attr-defined]
            _uncaught_in_thread, thread._invoke_excepthook)  # type: ignore[attr-defined]
    os._exit = _exit_at_once
    atexit.register(_at_exit)


def _is_installed() -> bool:
    """Whether this process is a rank, and fails as one.  A forked child does not."""
    return _installed_by == os.getpid()


def _uncaught(hook: Any, exc_type: type[BaseException], value: BaseException,
              tb: TracebackType | None) -> None:
    """Called ahead of ``sys.excepthook``."""
    text = ''
    with contextlib.suppress(MemoryError, RecursionError):
        text = ''.join(traceback.format_exception(exc_type, value, tb))
    is_default = hook is None or hook is sys.__excepthook__
    _end_job(f'uncaught {exc_type.__name__}', 1, text,
             None if is_default and text else functools.partial(
                 hook or sys.__excepthook__, exc_type, value, tb))


def _uncaught_in_thread(invoke: Callable[[threading.Thread], None], thread: threading.Thread
                        ) -> None:
    """Called by a thread in place of ``invoke``, which calls ``threading.excepthook``."""
    error = sys.exc_info()[1]
    # SystemExit ends the thread only. At the very end only daemon threads are left.
    if error is not None and not isinstance(error, SystemExit) and not is_over:
        why = f'uncaught {type(error).__name__} in thread {thread.name}'
        text = f'Exception in thread {thread.name}:\n{"".join(traceback.format_exception(error))}'
        if instead is not None and _is_installed():
            instead(why, text, error)
        is_default = threading.excepthook is threading.__excepthook__
        _end_job(why, 1, text, None if is_default else functools.partial(invoke, thread))
    invoke(thread)


def _unraisable(hook: Any, args: sys.UnraisableHookArgs) -> None:
    """Called ahead of ``sys.unraisablehook``, with an exception that has nowhere to go."""
    why, status = f'uncaught {args.exc_type.__name__}', 1
    if isinstance(args.exc_value, SystemExit):
        status = status_of(args.exc_value.code)
        why = f'sys.exit with status {status}'
    # Python ignores that of a __del__.
    if status and 'atexit' in (args.err_msg or '') and not is_failing():
        where = '' if args.object is None else f': {args.object!r}'
        text = ''.join(traceback.format_exception(
            args.exc_type, args.exc_value, args.exc_traceback))
        is_default = hook is None or hook is sys.__unraisablehook__
        _end_job(f'{why} in a function of atexit', in_8_bits(status),
                 f'{args.err_msg}{where}\n{text}',
                 None if is_default else functools.partial(hook, args))


def _exits(code: Any) -> Any:
    """Called when nobody catches a SystemExit; returns the code with which to exit."""
    global _exit_code
    if not _is_installed():
        return code
    _exit_code = status_of(code)
    return in_8_bits(_exit_code) if isinstance(code, int) else code


def _exit_at_once(status: int) -> NoReturn:
    """Exit to the system with specified status, without normal exit processing."""
    status = operator.index(status)
    if not _is_installed() or not -2 ** 31 <= status < 2 ** 31:
        _os_exit(status)  # raises if the status is that large
    if instead is not None or _way_to_end(1) is None:
        _os_exit(in_8_bits(status))
    stack = ''.join(traceback.format_stack(sys._getframe(1)))
    _end_job(f'os._exit with status {status}', in_8_bits(status) or 1,
             f'Stack (most recent call last):\n{stack}')
    raise AssertionError


def _at_exit() -> None:
    if _exit_code:
        _end_job(f'sys.exit with status {_exit_code}', in_8_bits(_exit_code))


def leave_word(text: str) -> None:
    """Tells ``python -m chainermn run``, if that started the job, why a rank of it ends."""
    folder = _environment.text(_environment.RUN_FOLDER)
    if folder:
        with contextlib.suppress(OSError):  # there is none on another machine
            path = f'{folder}/{time.time_ns()}-{os.getpid()}'
            with open(f'{path}.part', 'w') as file:
                file.write(text)
            os.rename(f'{path}.part', f'{path}.txt')


def _end_job(why: str, status: int = 1, text: str = '', show: Callable[[], Any] | None = None,
             end: Callable[[], Any] | None = None) -> None:
    """Names this process and ends the job; returns if there are no other processes to end.

    Args:
        why: The reason, in a line.
        status: That of mpiexec then.
        text: What is to be known besides.
        show: Shows that in another way.
        end: How to end the job, if that is known.
    """
    global _ending_thread
    end = _way_to_end(status) if end is None else end
    if end is None:
        return
    try:
        _flush()
        if _ending_thread == threading.get_ident():
            pass  # such as a hook that calls os._exit
        elif _ending_thread is not None or not (may_speak is None or may_speak()):
            time.sleep(_ENDED_WITHIN)
        else:
            _ending_thread = threading.get_ident()
            said = f'{_who()} ends the job: {why}'
            leave_word(said)
            _streams.write(f'chainermn: {said}\n{text if show is None else ""}')
            if show is not None:
                _call(show, text)
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


def _call(hook: Callable[[], Any], text: str) -> None:
    """Calls a hook of the program; shows the text if that fails."""
    try:
        hook()
    except Exception:
        _streams.write(f'Error in the hook of the program:\n{traceback.format_exc()}\n'
                       f'It was called for:\n{text}')


def shared_memory() -> set[str]:
    """The files of this process that MPICH removes at an ordinary end only."""
    with contextlib.suppress(OSError), open('/proc/self/maps', encoding='utf-8') as file:
        return {path for path in (line.split(None, 5)[-1].rstrip('\n') for line in file)
                if path.startswith('/dev/shm/mpich_shm_') and ' ' not in path}
    return set()


def _way_to_end(status: int) -> Callable[[], Any] | None:
    """How to end all processes of the job; ``None`` if there are no others."""
    if not _is_installed():
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
    for name in ('stdout', 'stderr'):
        with contextlib.suppress(Exception):  # there may be none
            getattr(sys, name).flush()
