"""``chainermn.launch``: run a function in MPI processes, from a script, a notebook or a test."""
from __future__ import annotations

import codecs
import collections
import contextlib
import inspect
import json
import linecache
import math
import operator
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from chainermn._commands.launch import rank_process, serialization
from chainermn._commands.launch.rank_failure import read_failures
from chainermn._operations.ranks import ranks_text
from chainermn._process import mpiexec, streams
from chainermn._process.environment import METRICS, RECORD, TIMELINE
from chainermn._process.running_time import RunningClock
from chainermn._types import Object
from chainermn.communicators import CommunicatorName

_Result = TypeVar('_Result')

_POLL_INTERVAL = 0.05  # seconds
_SETTLE_TIME = 0.3  # seconds after the first failure, for other failures and output to arrive
_GRACE_PERIOD = 5  # seconds for mpiexec to exit before it gets a signal
_FORWARD_TIME = 2  # seconds for mpiexec to forward output after all ranks have exited

#: Environment variables that make mpiexec start all processes on this node, even inside a batch
#: job. With MPICH, the processes communicate over the loopback interface only.
_LOCAL_ONLY = {
    'HYDRA_LAUNCHER': 'fork', 'HYDRA_RMK': 'user', 'UCX_NET_DEVICES': 'lo',  # MPICH
    'PRTE_MCA_plm': '^slurm,lsf,tm,pals', 'PRTE_MCA_ras': '^slurm,lsf,pbs,gridengine,flux',
}


def launch(fn: Callable[..., _Result], n: int, *args: Object,
           communicator_name: CommunicatorName = 'flat', timeout: float | None = None,
           env: Mapping[str, str] | None = None, **kwargs: Object) -> list[_Result]:
    """Start ``n`` MPI processes on this node; each calls ``fn(comm, *args, **kwargs)``.

    Works in scripts, notebooks and tests, even inside an MPI process, because it always starts new
    processes. ``fn`` can be defined in the script or notebook itself, and can be a lambda or a
    closure (cloudpickle serializes it). If it is defined in another module, that module must be on
    ``sys.path``. The output of the processes goes to the caller's ``sys.stdout`` and
    ``sys.stderr``.

    Args:
        fn: The function to call. Its first argument is the rank's communicator.
        n: The number of processes.
        args: Further positional arguments of ``fn``. Each process gets its own copy. Large arrays
            are written to a temporary folder (see ``TMPDIR``) once and copied only when a process
            writes to them.
        communicator_name: Name of the communicator; see :func:`chainermn.create_communicator`.
        timeout: Seconds within which all processes must finish; ``None`` for no limit.
        env: Additional environment variables for the processes. Unless ``OMP_NUM_THREADS`` is
            set here or in the environment of the caller, it is set to the number of available
            cores divided by ``n``, but at least 1. From a process that uses MPI, the variables
            ``CHAINERMN_METRICS``, ``CHAINERMN_RECORD`` and ``CHAINERMN_TIMELINE`` are not
            inherited.
        kwargs: Keyword arguments of ``fn``. If one of them has the name of an argument above, use
            ``functools.partial``.

    Returns:
        The results of ``fn``, ordered by rank.

    Raises:
        Exception: The error that ``fn`` raised on the rank that failed first, with the rank, its
            host and its traceback. All other processes are terminated.
        RuntimeError: If that error cannot be pickled, or if a process exited without returning
            from ``fn``; the message gives the rank and the signal or exit status.
        TimeoutError: If ``timeout`` expired. All processes are terminated.
        TypeError: If ``fn`` is not callable or does not accept the arguments, if ``n`` is not an
            integer or ``env`` does not contain strings, or if ``fn``, an argument or a result
            cannot be pickled.
        ValueError: If ``n`` or ``timeout`` is not positive.
        FileNotFoundError: If mpiexec is not found.

    If the caller is interrupted or killed, all processes are terminated as well. Processes that
    ``fn`` starts and leaves running continue; ``launch`` waits neither for them nor for their
    output.

    Example:
        >>> chainermn.launch(lambda comm: comm.allreduce_obj(comm.rank + 1), 2)
        [3, 3]
    """
    n = _check_arguments(fn, n, timeout, env, args, kwargs)
    command = [mpiexec.find_local(), '-n', str(n), sys.executable, rank_process.__file__]
    with tempfile.TemporaryDirectory(  # only this user can read it
            prefix='chainermn-launch-', ignore_cleanup_errors=True) as folder:
        # The source code of notebook cells is not in any file, but tracebacks should show it.
        cells = {name: entry for name, entry in linecache.cache.items()
                 if len(entry) == 4 and entry[1] is None}
        try:
            serialization.save(f'{folder}/call', (n, communicator_name, fn, args, kwargs, cells))
        except TypeError as error:
            advice = ''
            if "'mpi4py.MPI." in str(error):
                advice = ('. Use the communicator that launch passes to the function as its first '
                          'argument')
            raise TypeError(f'{_name(fn)} or one of its arguments {error}{advice}') from None
        with open(f'{folder}/path', 'w') as file:  # folders from which the ranks import modules
            json.dump([entry for entry in sys.path if isinstance(entry, str)], file)
        environment = mpiexec.environment(n, _LOCAL_ONLY)
        if 'mpi4py.MPI' in sys.modules:  # the caller uses these files and ports
            for name in (METRICS, RECORD, TIMELINE):
                environment.pop(name, None)
        environment.update(env or {})
        with _started([*command, folder], environment, folder, n) as process:
            output = _wait(process, folder, n, timeout)
            if failures := read_failures(folder):
                raise failures[0].error(folder, n, failures[1:])
            missing = _unfinished(folder, n)
            if process.returncode or missing:
                results = (f'before {ranks_text(missing)} of {n} had returned a result' if missing
                           else 'after all ranks had returned a result')
                raise RuntimeError(f'{command[0]} exited with status {process.returncode} '
                                   f'{results}. Its last output:\n{output}')
        return [serialization.load(f'{folder}/result-{rank}') for rank in range(n)]


def _check_arguments(fn: Callable[..., Object], n: int, timeout: float | None,
                     env: Mapping[str, str] | None, args: Sequence[Object],
                     kwargs: Mapping[str, Object]) -> int:
    """Check the arguments; return ``n`` as an ``int``."""
    if not callable(fn):
        raise TypeError(f'launch(fn, n, *args): fn must be a function, not {fn!r}')
    try:
        if isinstance(n, bool):
            raise TypeError
        number = operator.index(n)
    except TypeError:
        raise TypeError(f'launch(fn, n, *args): n must be an integer, not {n!r}') from None
    if number < 1:
        raise ValueError(f'launch(fn, n, *args): n must be a positive integer, not {n}')
    if timeout is not None and not timeout > 0:
        raise ValueError(f'timeout must be a positive number of seconds, not {timeout}')
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f'env must map strings to strings, but contains {name!r}: {value!r}')
    _check_signature(fn, args, kwargs)
    return number


def _check_signature(fn: Callable[..., Object], args: Sequence[Object],
                     kwargs: Mapping[str, Object]) -> None:
    """Raise TypeError if a function cannot be called with a communicator and these arguments."""
    try:
        # Do not follow __wrapped__: a decorator may add arguments.
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # C functions have no signature
        return
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError as error:
        raise TypeError('launch(fn, n, *args, **kwargs) calls fn(comm, *args, **kwargs), but the '
                        f'arguments do not match {_name(fn)}{signature}: {error}') from None


def _name(fn: Callable[..., Object]) -> str:
    return getattr(fn, '__name__', type(fn).__name__)


@contextlib.contextmanager
def _started(command: list[str], env: dict[str, str], folder: str, n: int
             ) -> Iterator[subprocess.Popen[bytes]]:
    """Run mpiexec; on leaving the context, terminate it and all its processes."""
    for name in ('caller', 'ranks'):
        os.mkfifo(f'{folder}/{name}')
    with contextlib.ExitStack() as stack:
        # This pipe reaches end-of-file when the last rank exits.
        ranks = os.open(f'{folder}/ranks', os.O_RDONLY | os.O_NONBLOCK)
        stack.callback(os.close, ranks)
        # The ranks exit when this pipe is closed.
        caller = stack.enter_context(open(f'{folder}/caller', 'r+b', 0))
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True)  # so that only the caller gets Ctrl-C
        try:
            yield process
        finally:
            caller.close()
            if os.path.basename(command[0]) == mpiexec.LOCAL and (
                    _have_exited(folder, n) or _is_closed(ranks)):
                process.kill()  # otherwise it looks for leftover processes for 2 seconds
            for stop in (None, process.terminate, process.kill):
                if stop is not None:
                    stop()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=_GRACE_PERIOD)  # the output is no longer needed
                    break
            rank_process.remove_shared_memory(folder)


def _is_closed(pipe: int) -> bool:
    """Wait until no process has the other end of a pipe open; return False after a grace period."""
    deadline = time.monotonic() + _GRACE_PERIOD
    while time.monotonic() < deadline:
        try:
            os.read(pipe, 1)
        except BlockingIOError:
            time.sleep(_POLL_INTERVAL / 5)
        else:
            return True
    return False


def _wait(process: subprocess.Popen[bytes], folder: str, n: int, timeout: float | None) -> str:
    """Forward output until mpiexec or all ranks have exited, or a rank has failed.

    mpiexec does not exit while a process that a rank left running can still print.

    Returns:
        The last part of the output.
    """
    output: collections.deque[str] = collections.deque(maxlen=50)
    clock = RunningClock()
    deadline = clock.poll() + (math.inf if timeout is None else timeout)
    with selectors.DefaultSelector() as selector:
        for pipe, name in ((process.stdout, 'stdout'), (process.stderr, 'stderr')):
            assert pipe is not None
            decoder = codecs.getincrementaldecoder('utf-8')('replace')
            selector.register(pipe, selectors.EVENT_READ, (name, decoder))
        end = None
        while process.poll() is None and (end is None or time.monotonic() < end):
            output.extend(_forward_output(selector, _POLL_INTERVAL))
            if end is None and read_failures(folder):
                end = time.monotonic() + _SETTLE_TIME
            elif end is None and _have_exited(folder, n):
                end = time.monotonic() + _FORWARD_TIME
            if clock.poll() > deadline:
                late = _unfinished(folder, n)
                who = (f'{ranks_text(late)} of {n}' if late
                       else 'processes of ranks that had returned a result')
                raise TimeoutError(f'{who} did not finish within {timeout} seconds; all '
                                   'processes were terminated')
        while process.returncode is not None and (texts := _forward_output(selector, 0)):
            output.extend(texts)
    return ''.join(output)[-2000:]


def _forward_output(selector: selectors.BaseSelector, seconds: float) -> list[str]:
    """Write output of the processes to the caller's streams; wait up to ``seconds`` for it."""
    if not selector.get_map():
        time.sleep(seconds)
        return []
    texts = []
    for key, _ in selector.select(seconds):
        name, decoder = key.data
        content = os.read(key.fd, 2 ** 16)
        if not content:
            selector.unregister(key.fileobj)
        if text := decoder.decode(content, final=not content):
            texts.append(text)
            streams.forward(text, name)
    return texts


def _have_exited(folder: str, n: int) -> bool:
    """Return whether all ranks have returned a result and exited."""
    return all(os.path.exists(f'{folder}/exited-{rank}') for rank in range(n))


def _unfinished(folder: str, n: int) -> list[int]:
    return [rank for rank in range(n) if not os.path.exists(f'{folder}/result-{rank}')]
