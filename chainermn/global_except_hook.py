"""Aborts the whole job when one of its ranks fails.

MPI processes wait for each other. If one rank exits early, the others would wait forever, and the
rank itself would wait for them in MPI_Finalize. After ``import chainermn``, a rank that fails
prints its number and the reason and aborts all other ranks (MPI_Abort), and ``mpiexec`` exits with
an error. A rank fails if an exception is not caught (in any thread or in an ``atexit`` function),
or if the script calls ``os._exit``, or ``sys.exit`` with a nonzero status. This also works if the
script installs its own hooks, which are still called. If a rank is killed, for example by a signal,
the node monitor (``_diagnostics/node_monitor``) reports it once the first communicator exists. If
an uncaught exception ends a rank before ``import chainermn``, the job is only aborted under
``chainermn run``; otherwise, only ``mpiexec`` reports it.

A process that is not part of a job with several MPI processes fails like any Python process, except
that it never exits with status 0 if it requested a different one, such as 256.

``CHAINERMN_FORCE_ABORT_ON_EXCEPTIONS=1`` calls :func:`add_hook` at import; ``=0`` disables the
hook, so that a debugger or a notebook can use its own. The name without the final S also works.

Functions for other modules of this package:

- :func:`abort_job` reports a failure and aborts the job. The watchdog calls it for a hang, and the
  shutdown calls it for an incomplete operation.
- :func:`abort_before_import` reports an exception before ``import chainermn`` and aborts the job.
- :func:`set_report_arbiter` lets the node monitor decide which rank of its node reports a failure.
- :func:`set_failure_handler` lets ``chainermn.launch`` report failures instead.
- :func:`mark_finished` notes that the shutdown is complete, so no rank waits for this one.
- :func:`aborts_job` and :func:`is_failing` return the state of this process.
"""
from __future__ import annotations

import atexit
import contextlib
import functools
import operator
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, TypeAlias

from chainermn._operations import common_error
from chainermn._process import environment, exit_status, launcher, runtime, streams
from chainermn._process.atomic_file import open_atomic
from chainermn._process.exit_status import in_8_bits, status_of

_VARIABLES = environment.FORCE_ABORT

# Seconds to wait before an abort, so that mpiexec can read the output, which it would then drop.
_FORWARD_TIMEOUT = 0.5
# Seconds that mpiexec may take to kill this process.
_ABORT_TIMEOUT = 10
# Seconds after which a rank prints a common error itself if the responsible rank has not.
_COMMON_ERROR_TIMEOUT = 5
# Seconds by which ranks on nodes without rank 0 delay a report while there is no node monitor.
_FIRST_NODE_TIME = 1
# Seconds that the launcher may take to abort the job before MPI_Init.
_LAUNCHER_TIMEOUT = 5

_ExceptHook: TypeAlias = Callable[
    [type[BaseException], BaseException, TracebackType | None], object]
_UnraisableHook: TypeAlias = 'Callable[[sys.UnraisableHookArgs], object]'
#: Called with the reason, the details, and the exception or ``None``. Does not return.
FailureHandler: TypeAlias = Callable[[str, str, BaseException | None], NoReturn]

_os_exit = os._exit


def _is_first_of_node() -> bool:
    """Return whether this rank reports its failure. Used while there is no node monitor."""
    if not launcher.is_on_first_node():
        time.sleep(_FIRST_NODE_TIME)
    return launcher.claim('report')


class _Hook(runtime.ProcessState):
    """State of the hook."""

    def __init__(self) -> None:
        self.is_installed = False
        #: Whether this process is a rank. A forked child is not.
        self.is_rank = True
        #: Whether to abort the job even if this process is its only one.
        self.is_forced = False
        #: The requested exit status once it is known, not limited to 8 bits.
        self.exit_code = 0
        self.reporting_thread: int | None = None
        self.has_finished = False
        self.failure_handler: FailureHandler | None = None
        self.is_first_report: Callable[[], bool] = _is_first_of_node

    def in_child(self) -> bool:
        self.is_rank = False
        return True


def _hook() -> _Hook:
    return runtime.get(_Hook)


def add_hook() -> None:
    """Abort the job on failure even if it has only one process.

    With several processes, ``import chainermn`` is sufficient. A second call has no effect.

    Example:
        >>> chainermn.global_except_hook.add_hook()
    """
    if _hook().is_forced:
        warnings.warn('chainermn.global_except_hook.add_hook() was called before, or '
                      f'{_VARIABLES[0]} is set, so this call has no effect.', stacklevel=2)
        return
    _hook().is_forced = True
    _install()


def _add_hook_if_enabled() -> None:
    if environment.flag(_variable()):
        add_hook()
    elif environment.flag(_variable(), default=True):  # not set
        _install()


def _variable() -> str:
    """Return the variable that enables or disables the hook."""
    return next((name for name in _VARIABLES if environment.text(name)), _VARIABLES[0])


def abort_before_import(error: Exception) -> None:
    """Abort the job after an uncaught exception that ends this rank before ``import chainermn``.

    ``chainer_compat`` calls it in the ranks of ``chainermn run``.

    Args:
        error: The exception, which Python has already printed.
    """
    if environment.flag(_variable(), default=True):
        _hook().is_installed = True
        _abort(f'uncaught {type(error).__name__} before import chainermn (traceback above)',
               error=error)


def abort_job(reason: str, details: str) -> None:
    """Report a failure and abort all ranks of the job, whatever they are doing.

    Does not return. It works even if the hook is disabled.
    """
    if (handler := _hook().failure_handler) is not None:
        handler(reason, details, None)
    mpi = sys.modules['mpi4py.MPI']
    _abort(reason, details=details, abort=lambda: mpi.COMM_WORLD.Abort(1))


def set_report_arbiter(is_first: Callable[[], bool]) -> None:
    """Set the function that decides whether this rank reports its failure.

    Args:
        is_first: Called before a failure is reported. Returns whether this rank is the first one of
            its node to fail. Later failures are consequences of the first and are not reported.
    """
    _hook().is_first_report = is_first


def set_failure_handler(handler: FailureHandler) -> None:
    """Set a function that handles failures instead of aborting the job."""
    _hook().failure_handler = handler


def mark_finished() -> None:
    """Note that all ranks have finished. Failing daemon threads no longer abort the job."""
    _hook().has_finished = True


def aborts_job() -> bool:
    """Return whether a failure of this process aborts the job instead of calling a handler."""
    return _is_installed() and _hook().failure_handler is None


def is_failing() -> bool:
    """Return whether the process is about to exit with an error."""
    return _hook().exit_code != 0


def _install() -> None:
    if _hook().is_installed:
        return
    _hook().is_installed = True
    outcome = exit_status.outcome()
    outcome.uncaught, outcome.unraisable, outcome.exits = _uncaught, _unraisable, _exits
    exit_status.listen()
    # A new thread calls this function to get the function that handles its uncaught exception. The
    # latter reads threading.excepthook only when it is called.
    make = threading._make_invoke_excepthook  # type: ignore[attr-defined]
    threading._make_invoke_excepthook = (  # type: ignore[attr-defined]
        lambda: functools.partial(_uncaught_in_thread, make()))
    for thread in threading.enumerate():
        thread._invoke_excepthook = functools.partial(  # type: ignore[attr-defined]
            _uncaught_in_thread, thread._invoke_excepthook)  # type: ignore[attr-defined]
    os._exit = _exit_at_once
    atexit.register(_at_exit)


def _is_installed() -> bool:
    """Return whether this process is a rank with the hook. A forked child is not."""
    return _hook().is_installed and _hook().is_rank


def _uncaught(hook: _ExceptHook | None, exc_type: type[BaseException], value: BaseException,
              tb: TracebackType | None) -> None:
    """Report an uncaught exception, before ``sys.excepthook`` is called."""
    is_default = hook is None or hook is sys.__excepthook__
    if is_default and issubclass(exc_type, KeyboardInterrupt) and not environment.flag(
            environment.DEBUG):
        _abort('interrupted by Ctrl-C or SIGINT')
    if is_default and common_error.is_shown(value):
        text = ''.join(traceback.format_exception_only(exc_type, value)).partition('\n')[0]
        place = common_error.program_line(value)  # Chainer prints only frames inside Trainer.run
        _abort(f'uncaught {text}{place and f", at {place}"} (traceback above)')
    text = ''
    if _abort_function(1) is not None:
        common_error.hide_frames(value)
        tb = value.__traceback__
        if not common_error.is_printed_here(value):
            time.sleep(_COMMON_ERROR_TIMEOUT)
    with contextlib.suppress(MemoryError, RecursionError):
        text = ''.join(traceback.format_exception(exc_type, value, tb))
    _abort(f'uncaught {exc_type.__name__}', 1, text,
           None if is_default and text else functools.partial(
               hook or sys.__excepthook__, exc_type, value, tb), error=value)


def _uncaught_in_thread(invoke: Callable[[threading.Thread], None], thread: threading.Thread
                        ) -> None:
    """Report the uncaught exception of a thread. ``invoke`` calls ``threading.excepthook``."""
    error = sys.exc_info()[1]
    # SystemExit ends only the thread. After the shutdown, only daemon threads are left.
    if error is not None and not isinstance(error, SystemExit) and not _hook().has_finished:
        reason = f'uncaught {type(error).__name__} in thread {thread.name}'
        text = f'Exception in thread {thread.name}:\n{"".join(traceback.format_exception(error))}'
        if (handler := _hook().failure_handler) is not None and _is_installed():
            handler(reason, text, error)
        is_default = threading.excepthook is threading.__excepthook__
        _abort(reason, 1, text, None if is_default else functools.partial(invoke, thread),
               error=error)
    invoke(thread)


def _unraisable(hook: _UnraisableHook | None, args: sys.UnraisableHookArgs) -> None:
    """Report an exception that cannot be raised, before ``sys.unraisablehook`` is called."""
    reason, status = f'uncaught {args.exc_type.__name__}', 1
    if isinstance(args.exc_value, SystemExit):
        status = status_of(args.exc_value.code)
        reason = f'sys.exit with status {status}'
    # Python ignores exceptions of __del__.
    if status and 'atexit' in (args.err_msg or '') and not is_failing():
        where = '' if args.object is None else f': {args.object!r}'
        text = ''.join(traceback.format_exception(
            args.exc_type, args.exc_value, args.exc_traceback))
        show = None if hook is None or hook is sys.__unraisablehook__ else functools.partial(
            hook, args)
        _abort(f'{reason} in an atexit function', in_8_bits(status),
               f'{args.err_msg}{where}\n{text}', show,
               error=None if isinstance(args.exc_value, SystemExit) else args.exc_value)


def _exits(code: object) -> object:
    """Record the code of an uncaught SystemExit and return the code to exit with."""
    if not _is_installed():
        return code
    _hook().exit_code = status_of(code)
    return in_8_bits(status_of(code)) if isinstance(code, int) else code


def _exit_at_once(status: int) -> NoReturn:
    """Exit to the system with specified status, without normal exit processing."""
    status = operator.index(status)
    if not _is_installed() or not -2 ** 31 <= status < 2 ** 31:
        _os_exit(status)  # raises an error if the status does not fit into 32 bits
    if _hook().failure_handler is not None or _abort_function(1) is None:
        _os_exit(in_8_bits(status))
    stack = ''.join(traceback.format_stack(sys._getframe(1)))
    _abort(f'os._exit with status {status}', in_8_bits(status) or 1,
           f'Stack (most recent call last):\n{stack}')
    raise AssertionError


def _at_exit() -> None:
    if code := _hook().exit_code:
        place = exit_status.outcome().place
        _abort(f'sys.exit with status {code}{place and f", called at {place}"}', in_8_bits(code))


def _write_to_run_folder(text: str, error: BaseException | None) -> None:
    """Write the report to a file for ``chainermn run``, if it started the job."""
    folder = environment.text(environment.RUN_FOLDER)
    if folder:
        with contextlib.suppress(Exception):  # an error in __str__ of the exception
            text = f'{text}: {error}' if error is not None and str(error) else text
        with contextlib.suppress(OSError):  # the folder does not exist on other nodes
            path = f'{folder}/{time.time_ns()}-{os.getpid()}.txt'
            with open_atomic(path, sync=False) as file:
                file.write(text.encode(errors='replace'))


def _abort(reason: str, status: int = 1, details: str = '',
           show: Callable[[], object] | None = None,
           abort: Callable[[], object] | None = None,
           error: BaseException | None = None) -> None:
    """Report a failure and abort the job. Return if there are no other processes.

    Args:
        reason: The reason, on one line.
        status: The exit status of mpiexec.
        details: Further lines of the report.
        show: Function that prints the details instead, such as an exception hook of the script.
        abort: Function that aborts the job; selected automatically by default.
        error: The exception, if one is the reason.
    """
    abort = _abort_function(status) if abort is None else abort
    if abort is None:
        return
    try:
        _flush()
        if _hook().reporting_thread == threading.get_ident():
            pass  # for example, a hook of the script calls os._exit
        elif _hook().reporting_thread is not None or not _hook().is_first_report():
            time.sleep(_ABORT_TIMEOUT)
        else:
            _hook().reporting_thread = threading.get_ident()
            report = f'{_rank_text()} aborts the job: {reason}'
            _write_to_run_folder(report, error)
            streams.write(f'chainermn: {report}\n{details if show is None else ""}')
            if show is not None:
                _call(show, details)
    finally:
        _flush()
        time.sleep(_FORWARD_TIMEOUT)
        for path in shared_memory():
            with contextlib.suppress(OSError):
                os.unlink(path)
        streams.silence_stderr()  # MPI's message would hide the report
        abort()
        # MPICH's MPI_Abort can return before mpiexec kills this process, which must not continue.
        time.sleep(_ABORT_TIMEOUT)
        _os_exit(status)


def _call(hook: Callable[[], object], details: str) -> None:
    """Call a hook of the script. If the hook fails, print the details."""
    try:
        hook()
    except Exception:
        streams.write(f'Error in the exception hook of the script:\n{traceback.format_exc()}\n'
                       f'The hook was called for:\n{details}')


def shared_memory() -> set[str]:
    """Return the files of this process that MPICH only removes on a normal exit."""
    with contextlib.suppress(OSError), open('/proc/self/maps', encoding='utf-8') as file:
        return set(re.findall(r'/dev/shm/mpich_shm_\S+$', file.read(), re.MULTILINE))
    return set()


def _abort_function(status: int) -> Callable[[], object] | None:
    """Return a function that aborts the job, or ``None`` if there are no other processes."""
    if not _is_installed():
        return None  # a forked child, such as a worker of MultiprocessIterator, is not a rank
    # Do not import mpi4py here: the import initializes MPI, which waits for the other processes.
    mpi = sys.modules.get('mpi4py.MPI')
    if mpi is not None and mpi.Is_initialized():
        if mpi.Is_finalized() or not (_hook().is_forced or mpi.COMM_WORLD.size > 1):
            return None
        return lambda: mpi.COMM_WORLD.Abort(status)
    if launcher.is_connected() and int(os.environ.get('PMI_SIZE', 1)) > 1:
        # MPICH's mpiexec ignores a process that exits before MPI_Init, where the others wait.
        return functools.partial(_abort_before_mpi, status)
    return None


def _abort_before_mpi(status: int) -> None:
    launcher.abort(status)
    time.sleep(_LAUNCHER_TIMEOUT)
    # The launcher did not abort the job, but it does not ignore a process that a signal kills.
    os.kill(os.getpid(), signal.SIGKILL)  # other signals can be caught


def _rank_text() -> str:
    mpi = sys.modules.get('mpi4py.MPI')
    if mpi is not None and mpi.Is_initialized():
        rank, size = mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size
    else:
        rank, size = os.environ['PMI_RANK'], os.environ['PMI_SIZE']
    return f'rank {rank} of {size} (host {os.uname().nodename}, process {os.getpid()})'


def _flush() -> None:
    for name in ('stdout', 'stderr'):
        with contextlib.suppress(Exception):  # the stream may be missing
            getattr(sys, name).flush()
