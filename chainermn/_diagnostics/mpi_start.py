"""Reports ranks that wait for others to start MPI.

With MPICH, MPI_Init waits for all ranks. A rank that ends normally before it has started MPI is
ignored by mpiexec, so the others wait forever. MPI_Init holds the GIL, so no thread of Python can
notice this; a shell does.
"""
from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from chainermn._diagnostics import call_site, stall_warning, timeouts
from chainermn._process import environment, launcher

#: Each ``cat`` reads until this process closes the pipe, because it has started MPI or has ended.
#: ``timeout`` exits with status 124 if that takes too long. The waiting time is divided, so that a
#: job that is suspended for a long time is not aborted when it is resumed.
_WAIT = """n=0
while [ $n -lt {parts} ]; do
    timeout {seconds} cat
    [ $? -eq 124 ] || exit
    n=$((n + 1))
done
printf %s "${text}" >&2
"""
_PARTS = 20
_ABORT = 'kill -KILL $PPID'  # mpiexec then ends the job

_REPORTERS = ('0', '1')  # two ranks, in case one of them does not start MPI


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Return a context for starting MPI, in which ranks 0 and 1 report that they wait too long.

    After the time for the stall warning, they print a warning; after the timeout, they abort the
    job. Other launchers than MPICH's end the job if a rank ends without starting MPI.
    """
    if 'mpi4py.MPI' in sys.modules or os.environ.get('PMI_RANK') not in _REPORTERS or (
            int(os.environ.get('PMI_SIZE', 1)) == 1 or not launcher.is_connected()):
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # there is no shell
            if command := _command():
                shell = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
                stack.callback(shell.wait)
                assert shell.stdin is not None
                stack.callback(shell.stdin.close)
        yield


def _command() -> list[str]:
    """Return the command of the shell; an empty list if nothing is to be reported."""
    stall = timeouts.from_environment(environment.STALL_WARNING, stall_warning.DEFAULT)
    timeout = timeouts.from_environment(timeouts.VARIABLE, timeouts.DEFAULT)
    rank = int(os.environ['PMI_RANK'])
    place = f'in create_communicator{call_site.describe()}'
    script, texts, waited = [], ['sh'], 0.
    if stall and (not timeout or stall < timeout):
        texts.append(stall_warning.creation_text(rank, place, stall))
        script.append(_WAIT.format(parts=1, seconds=stall, text=1))
        waited = stall
    if timeout:
        texts.append(f'chainermn: rank {rank} of {os.environ["PMI_SIZE"]} (host '
                     f'{os.uname().nodename}, process {os.getpid()}) aborts the job: waited for '
                     f'{timeout:g} s {place}; does every rank call '
                     f'create_communicator? {timeouts.text(timeout)}\n')
        script += [_WAIT.format(parts=_PARTS, seconds=(timeout - waited) / _PARTS,
                                text=len(texts) - 1), _ABORT]
    return ['sh', '-c', ''.join(script), *texts] if script else []
