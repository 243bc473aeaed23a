"""A rank of :func:`chainermn.launch`: one process runs the function, another watches over it.

mpiexec starts this file.  It forks before anything is imported: the child is the rank, and this
process waits for it, so that it knows how the rank ended, whatever ended it.  When the caller has
gone, or wants the end, it kills the rank and all that the rank has started.

A rank that fails writes down why and waits for the caller to end the job.  So the caller alone
says what went wrong, and hears of other ranks that fail at about the same time.
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
from typing import Any, NoReturn

#: Of MPICH and its kin, of Open MPI, and of any mpiexec that speaks PMIx.
_VARIABLES = ('PMI_RANK', 'OMPI_COMM_WORLD_RANK', 'PMIX_RANK')


class _Rank:
    """What a rank leaves in the caller's folder."""

    def __init__(self, folder: str, rank: int) -> None:
        self.folder, self.rank = folder, rank

    @property
    def has_result(self) -> bool:
        return os.path.exists(f'{self.folder}/result-{self.rank}')

    def run(self) -> None:
        """Runs the function; is the rank."""
        try:
            with open(f'{self.folder}/path') as file:
                sys.path[:] = json.load(file)
            # A line appears when it is printed, and in one piece.
            for stream in (sys.stdout, sys.stderr):
                assert isinstance(stream, io.TextIOWrapper)
                stream.reconfigure(line_buffering=True, write_through=False)
            self._call()
        except BaseException as error:  # SystemExit, too: there is no result
            self._fail(error, error.__traceback__)

    def _call(self) -> None:
        import linecache

        from chainermn import global_except_hook
        from chainermn._launch import _parcel
        from chainermn.communicators import create_communicator

        global_except_hook.instead = self._fail_because
        n, communicator_name, fn, args, kwargs, cells = _parcel.load(f'{self.folder}/call')
        linecache.cache.update(cells)
        comm = create_communicator(communicator_name)
        with open(f'{self.folder}/shared-{self.rank}', 'w') as file:
            json.dump(sorted(global_except_hook.shared_memory()), file)
        if comm.size != n:
            raise RuntimeError(
                f'mpiexec started {n} processes, and mpi4py finds {comm.size}: they belong to '
                'different MPI libraries. Install one, such as "pip install mpich".')
        result = fn(comm, *args, **kwargs)
        try:
            _parcel.save(f'{self.folder}/result-{self.rank}', result)
        except TypeError as error:
            raise TypeError(f'the result of rank {self.rank}, of {type(result)}, {error}'
                            ) from error

    def _fail(self, error: BaseException, tb: TracebackType | None) -> NoReturn:
        while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
            tb = tb.tb_next
        error = error.with_traceback(tb)
        text = ''.join(traceback.format_exception(error))
        what = ''.join(traceback.format_exception_only(error)).strip()
        with contextlib.suppress(Exception):  # the text is enough
            from chainermn._launch import _parcel
            _parcel.save(f'{self.folder}/error-{self.rank}', error.with_traceback(None))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        self.tell(what, os.getpid(), text)
        while True:
            time.sleep(3600)

    def _fail_because(self, why: str, text: str, error: BaseException | None) -> NoReturn:
        if error is not None:
            self._fail(error, error.__traceback__)
        self.tell(why, os.getpid(), text)
        while True:
            time.sleep(3600)

    def tell(self, what: str, process: int, text: str = '') -> None:
        """Writes down why this rank failed, unless it has said so before."""
        path = f'{self.folder}/failed-{self.rank}'
        if os.path.exists(path):
            return
        said = {'what': what, 'text': text, 'when': time.monotonic(), 'process': process,
                'host': os.uname().nodename}
        with open(f'{path}.part', 'w') as file:
            json.dump(said, file)
        os.rename(f'{path}.part', path)


def remove_shared_memory(folder: str) -> None:
    """Removes what MPI leaves of ranks that were ended.

    Its names come from the number of the process of mpiexec: a later job with that number would
    take what is left for its own, and fail in MPI_Init.
    """
    for path in glob.glob(f'{glob.escape(folder)}/shared-*'):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            for name in json.load(file):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)


def _watch_caller(folder: str, process: int) -> None:
    """Returns never: kills everything here when the caller closes its end, as it does by dying."""
    with contextlib.suppress(OSError):  # it had gone before, or the folder has
        pipe = os.open(f'{folder}/caller', os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(pipe, True)
        os.read(pipe, 1)
    with contextlib.suppress(OSError):
        os.killpg(process, signal.SIGKILL)
    remove_shared_memory(folder)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # mpiexec has nobody to end, which takes it a while


def _die_with(parent: int) -> None:
    """Asks Linux to kill this process when its parent ends."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _how(status: int) -> str:
    if status >= 0:
        return f'ended with exit status {status}'
    with contextlib.suppress(ValueError):
        return f'was killed by signal {-status} ({signal.Signals(-status).name})'
    return f'was killed by signal {-status}'


def main(folder: str) -> Any:
    found = [os.environ[name] for name in _VARIABLES if name in os.environ]
    if not found:
        sys.exit(f'mpiexec told a process no rank; chainermn.launch knows {", ".join(_VARIABLES)}')
    rank = _Rank(folder, int(found[0]))
    here = os.getpid()
    os.open(f'{folder}/ranks', os.O_RDWR)  # closed when this process and the rank have ended
    process = os.fork()
    with contextlib.suppress(OSError):  # each of the two, as the other may be late
        os.setpgid(process, process)
    if process == 0:
        _die_with(here)
        return rank.run()
    threading.Thread(target=_watch_caller, args=(folder, process), daemon=True).start()
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if status == 0 and rank.has_result:
        os._exit(0)
    rank.tell(_how(status) + (', after' if rank.has_result else ' without') + ' a result', process)
    while True:
        time.sleep(3600)  # an mpiexec that knew would end the others before they can say more


if __name__ == '__main__':
    main(*sys.argv[1:])
