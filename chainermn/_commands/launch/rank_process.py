"""A rank of :func:`chainermn.launch`: a parent process, and a child that runs the function.

mpiexec runs this file, which forks before importing anything. The child becomes the rank. The
parent waits for the child and reports how it exited. When the caller exits or closes its pipe, the
parent kills the rank and everything that the rank has started.

A rank that fails writes the reason to a file and waits for the caller to terminate the job. So
only the caller reports the error, and it also sees other ranks that fail at the same time.
"""
from __future__ import annotations

import contextlib
import glob
import io
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import NoReturn

#: Environment variables in which mpiexec passes the rank: MPICH and derivatives, Open MPI, PMIx.
_RANK_VARIABLES = ('PMI_RANK', 'OMPI_COMM_WORLD_RANK', 'PMIX_RANK')


class _Rank:
    """The files of one rank in the caller's folder."""

    def __init__(self, folder: str, rank: int) -> None:
        self.folder, self.rank = folder, rank

    @property
    def has_result(self) -> bool:
        return os.path.exists(f'{self.folder}/result-{self.rank}')

    def mark_exited(self) -> None:
        """Record that the rank has exited after returning a result."""
        with open(f'{self.folder}/exited-{self.rank}', 'w'):
            pass

    def run(self) -> None:
        """Run the function and save its result."""
        try:
            with open(f'{self.folder}/path') as file:
                sys.path[:] = json.load(file)
            # Write whole lines as soon as they are printed.
            for stream in (sys.stdout, sys.stderr):
                assert isinstance(stream, io.TextIOWrapper)
                stream.reconfigure(line_buffering=True, write_through=False)
            self._call()
        except BaseException as error:  # including SystemExit, because there is no result
            self._fail(error, error.__traceback__)

    def _call(self) -> None:
        import linecache

        from chainermn import global_except_hook
        from chainermn._commands.launch import serialization
        from chainermn.communicators import create_communicator

        global_except_hook.set_failure_handler(self._fail_because)
        n, communicator_name, fn, args, kwargs, cells = serialization.load(f'{self.folder}/call')
        linecache.cache.update(cells)
        comm = create_communicator(communicator_name)
        with open(f'{self.folder}/shared-{self.rank}', 'w') as file:
            json.dump(sorted(global_except_hook.shared_memory()), file)
        if comm.size != n:
            raise RuntimeError(
                f'mpiexec started {n} processes, but mpi4py sees {comm.size}: they use different '
                'MPI libraries. Install only one of them, for example with "pip install mpich".')
        result = fn(comm, *args, **kwargs)
        try:
            serialization.save(f'{self.folder}/result-{self.rank}', result)
        except TypeError as error:
            raise TypeError(f'the result of rank {self.rank} ({type(result)}) {error}'
                            ) from error

    def _fail(self, error: BaseException, tb: TracebackType | None) -> NoReturn:
        while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
            tb = tb.tb_next
        error = error.with_traceback(tb)
        with contextlib.suppress(ImportError):  # an import may be what failed
            from chainermn._operations import common_error
            common_error.hide_frames(error)
        text = ''.join(traceback.format_exception(error))
        reason = ''.join(traceback.format_exception_only(error)).strip()
        with contextlib.suppress(Exception):  # the text is sufficient
            from chainermn._commands.launch import serialization
            serialization.save(f'{self.folder}/error-{self.rank}', error.with_traceback(None))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        self.report_and_wait(reason, os.getpid(), text)

    def _fail_because(self, reason: str, text: str, error: BaseException | None) -> NoReturn:
        if error is not None:
            self._fail(error, error.__traceback__)
        self.report_and_wait(reason, os.getpid(), text)

    def report_and_wait(self, reason: str, process: int, traceback: str = '') -> NoReturn:
        """Write the reason for the failure to a file, unless there is one already.

        If this process exited, mpiexec would kill the other ranks before they can report failures.
        """
        path = f'{self.folder}/failed-{self.rank}'
        if not os.path.exists(path):
            failure = {'reason': reason, 'traceback': traceback, 'when': time.monotonic(),
                       'process': process, 'host': os.uname().nodename}
            with open(f'{path}.part', 'w') as file:
                json.dump(failure, file)
            os.rename(f'{path}.part', path)
        while True:
            time.sleep(3600)


def remove_shared_memory(folder: str) -> None:
    """Remove shared memory that MPI leaves behind when ranks are killed.

    MPI derives the names from mpiexec's process ID. A later job with the same ID would use the
    leftover segments and fail in MPI_Init.
    """
    for path in glob.glob(f'{glob.escape(folder)}/shared-*'):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            for name in json.load(file):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)


def _watch_caller(folder: str, process: int) -> None:
    """Kill the rank when the caller closes its end of the pipe or dies. Never returns."""
    with contextlib.suppress(OSError):  # the caller has already exited
        pipe = os.open(f'{folder}/caller', os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(pipe, True)
        os.read(pipe, 1)
    with contextlib.suppress(OSError):
        os.killpg(process, signal.SIGKILL)
    remove_shared_memory(folder)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # so that mpiexec does not spend time terminating this process


def _die_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _describe(status: int) -> str:
    if status >= 0:
        return f'exited with status {status}'
    with contextlib.suppress(ValueError):
        return f'was killed by signal {-status} ({signal.Signals(-status).name})'
    return f'was killed by signal {-status}'


def main(folder: str) -> None:
    """Run one rank of the job.

    Args:
        folder: The folder of the caller, with the files of the job.
    """
    found = [os.environ[name] for name in _RANK_VARIABLES if name in os.environ]
    if not found:
        sys.exit('chainermn.launch: mpiexec set none of the environment variables '
                 f'{", ".join(_RANK_VARIABLES)}')
    rank = _Rank(folder, int(found[0]))
    here = os.getpid()
    os.open(f'{folder}/ranks', os.O_RDWR)  # closed when this process and the rank exit
    process = os.fork()
    with contextlib.suppress(OSError):  # in both processes, because either may run first
        os.setpgid(process, process)
    if process == 0:
        _die_with(here)
        rank.run()
        return
    threading.Thread(target=_watch_caller, args=(folder, process), daemon=True).start()
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if status == 0 and rank.has_result:
        rank.mark_exited()
        os._exit(0)
    result = f' {"after" if rank.has_result else "without"} returning a result'
    rank.report_and_wait(_describe(status) + result, process)


if __name__ == '__main__':
    main(*sys.argv[1:])
