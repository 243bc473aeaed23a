"""``chainermn.launch``: run a function on MPI processes, from a script, a notebook or a test."""
from __future__ import annotations

import codecs
import collections
import contextlib
import json
import linecache
import operator
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from chainermn import _mpiexec, _streams
from chainermn._launch import _parcel, _rank
from chainermn._launch._failure import failures_in

_Result = TypeVar('_Result')

_EVERY = 0.05  # seconds between two looks at what the ranks have written
_GRACE = 0.3  # seconds that other ranks have to fail as well, and that output takes to arrive
_ENDED_WITHIN = 5  # seconds for mpiexec to end, before it is made to

#: Every process is on this machine, whatever the batch system would offer, and with MPICH none can
#: be reached from another one.
_HERE = {
    'HYDRA_LAUNCHER': 'fork', 'HYDRA_RMK': 'user', 'UCX_NET_DEVICES': 'lo',  # MPICH
    'PRTE_MCA_plm': '^slurm,lsf,tm,pals', 'PRTE_MCA_ras': '^slurm,lsf,pbs,gridengine,flux',
}


def launch(fn: Callable[..., _Result], n: int, *args: Any, communicator_name: str = 'flat',
           timeout: float | None = None, env: Mapping[str, str] | None = None,
           **kwargs: Any) -> list[_Result]:
    """Starts ``n`` MPI processes on this machine; each calls ``fn(comm, *args, **kwargs)``.

    Works in a script, a notebook and a test, and within an MPI process: those started are new
    ones.  Functions of the script or the notebook itself, lambdas and closures are all right
    (cloudpickle carries them); a function of another module needs that module on ``sys.path``.
    What the processes print appears in the caller's ``sys.stdout`` and ``sys.stderr``.

    Args:
        fn: The function.  Its first argument is the rank's communicator.
        n: The number of processes.
        args: Further arguments.  Each process gets its own copy; large arrays are written to a
            temporary folder (of ``TMPDIR``) once, and copied only where a process writes to them.
        communicator_name: What ``fn`` gets; see :func:`chainermn.create_communicator`.
        timeout: Seconds until all processes have to have ended; ``None`` waits forever.
        env: Environment variables of the processes, besides those of the caller.  Without
            ``OMP_NUM_THREADS`` in either, the processes share the cores: it is the number of cores
            this process may use divided by ``n``, and at least 1.
        kwargs: Keyword arguments of ``fn``.  (For one that has the name of an argument above, use
            ``functools.partial``.)

    Returns:
        What ``fn`` returned on each rank, by rank.

    Raises:
        Exception: The error that ``fn`` raised on the rank that failed first, with the rank, its
            host and its traceback.  All other processes are ended.
        RuntimeError: If that error cannot be pickled, or a process ended otherwise than by
            returning from ``fn``: the message names the rank, and signal or exit status.
        TimeoutError: If the time is over.  All processes are ended.
        TypeError: If ``fn`` is no function or ``n`` no integer, or if ``fn``, an argument or a
            result cannot be pickled.
        ValueError: If ``n`` is less than 1, or ``timeout`` not more than 0.
        FileNotFoundError: If there is no mpiexec.

    When the caller is interrupted or killed, all processes end, too.
    """
    n = _checked(fn, n, timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    command = [_mpiexec.find_local(), '-n', str(n), sys.executable, _rank.__file__]
    with tempfile.TemporaryDirectory(  # readable by this user only
            prefix='chainermn-launch-', ignore_cleanup_errors=True) as folder:
        # The source of a notebook's cells is nowhere else, and tracebacks show it.
        cells = {name: entry for name, entry in linecache.cache.items()
                 if len(entry) == 4 and entry[1] is None}
        try:
            _parcel.save(f'{folder}/call', (n, communicator_name, fn, args, kwargs, cells))
        except TypeError as error:
            raise TypeError(f'the function {fn!r} or an argument {error}') from error
        with open(f'{folder}/path', 'w') as file:  # where all that the call names is found
            json.dump([entry for entry in sys.path if isinstance(entry, str)], file)
        environment = {**_mpiexec.environment(n, _HERE), **(env or {})}
        with _started([*command, folder], environment, folder) as process:
            said = _wait(process, folder, n, timeout, deadline)
            if failures := failures_in(folder):
                raise failures[0].error(folder, n, failures[1:])
            missing = _unfinished(folder, n)
            if process.returncode or missing:
                left = f'no result of {_ranks(missing, n)}' if missing else 'all results'
                raise RuntimeError(f'{command[0]} ended with status {process.returncode} and left '
                                   f'{left}. What was printed last:\n{said}')
        return [_parcel.load(f'{folder}/result-{rank}') for rank in range(n)]


def _checked(fn: Any, n: Any, timeout: Any) -> int:
    """Returns the number of processes, once the arguments are known to be right."""
    if not callable(fn):
        raise TypeError(f'launch needs a function, not {fn!r}: launch(fn, n, *args)')
    try:
        if isinstance(n, bool):
            raise TypeError
        number = operator.index(n)
    except TypeError:
        raise TypeError(f'the number of processes has to be an integer, not {n!r}: '
                        'launch(fn, n, *args)') from None
    if number < 1:
        raise ValueError(f'the number of processes has to be 1 or more, not {n}')
    if timeout is not None and not timeout > 0:
        raise ValueError(f'the timeout has to be more than 0 seconds, not {timeout}')
    return number


@contextlib.contextmanager
def _started(command: list[str], env: dict[str, str], folder: str
             ) -> Iterator[subprocess.Popen[bytes]]:
    """mpiexec, which ends with the body of the with statement, as do all that it started."""
    for name in ('caller', 'ranks'):
        os.mkfifo(f'{folder}/{name}')
    with contextlib.ExitStack() as stack:
        ranks = os.open(f'{folder}/ranks', os.O_RDONLY | os.O_NONBLOCK)  # its end is their end
        stack.callback(os.close, ranks)
        caller = stack.enter_context(open(f'{folder}/caller', 'r+b', 0))  # and that of this one...
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True)  # Ctrl-C interrupts the caller, and nobody else
        try:
            yield process
        finally:
            caller.close()  # ...is the end of all ranks
            if os.path.basename(command[0]) == _mpiexec.LOCAL and _is_closed(ranks):
                process.kill()  # it would look for processes to kill, for 2 seconds
            for stop in (None, process.terminate, process.kill):
                if stop is not None:
                    stop()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=_ENDED_WITHIN)  # what it says now is no news
                    break
            _rank.remove_shared_memory(folder)


def _is_closed(pipe: int) -> bool:
    """Waits until nobody has the other end of a pipe; says whether that is so in time."""
    give_up = time.monotonic() + _ENDED_WITHIN
    while time.monotonic() < give_up:
        try:
            os.read(pipe, 1)
        except BlockingIOError:
            time.sleep(_EVERY / 5)
        else:
            return True
    return False


def _wait(process: subprocess.Popen[bytes], folder: str, n: int, timeout: float | None,
          deadline: float | None) -> str:
    """Shows what is printed, until all processes have ended or one has failed.

    Returns:
        The end of what was printed.
    """
    said: collections.deque[str] = collections.deque(maxlen=50)
    with selectors.DefaultSelector() as selector:
        for pipe, name in ((process.stdout, 'stdout'), (process.stderr, 'stderr')):
            assert pipe is not None
            decoder = codecs.getincrementaldecoder('utf-8')('replace')
            selector.register(pipe, selectors.EVENT_READ, (name, decoder))
        end = None
        while process.poll() is None and (end is None or time.monotonic() < end):
            said.extend(_show(selector, _EVERY))
            if end is None and failures_in(folder):
                end = time.monotonic() + _GRACE
            if deadline is not None and time.monotonic() > deadline:
                late = _unfinished(folder, n)
                who = _ranks(late, n) if late else 'all ranks had a result, but their processes'
                raise TimeoutError(f'{who} had not finished within {timeout} seconds; '
                                   'all processes were ended')
        while process.returncode is not None and (texts := _show(selector, 0)):
            said.extend(texts)
    return ''.join(said)[-2000:]


def _show(selector: selectors.BaseSelector, seconds: float) -> list[str]:
    """Writes what has arrived, waiting for it so long, to the stream of the caller."""
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
            _streams.write(text, name)
    return texts


def _unfinished(folder: str, n: int) -> list[int]:
    return [rank for rank in range(n) if not os.path.exists(f'{folder}/result-{rank}')]


def _ranks(ranks: list[int], n: int) -> str:
    return f'rank{"s" * (len(ranks) > 1)} {", ".join(map(str, ranks))} of {n}'
