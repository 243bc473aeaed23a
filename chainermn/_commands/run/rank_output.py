"""The output of a rank: labels its lines, and writes them to a file of the rank.

It runs as a script, ``python rank_output.py ATTEMPT IS_LABELED FOLDER PROGRAM ARGS...``, started by
mpiexec in place of the program. The program replaces it, so it has the same process ID; a second
process forwards what it writes, until the program and its children have closed their outputs. It
uses only the standard library, so it starts immediately.
"""
from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import time
from typing import BinaryIO

#: MPICH and Slurm's PMI, Open MPI, other libraries with PMIx, Slurm.
_RANKS = 'PMI_RANK', 'OMPI_COMM_WORLD_RANK', 'PMIX_RANK', 'SLURM_PROCID'

_SIZE = 1 << 16  # bytes per read
_LINE_END = re.compile(rb'(?<=\n)|(?<=\r)(?!\n)')  # progress bars end lines with \r


class _RankOutput:
    """One of the outputs of the rank.

    Args:
        target: Where lines are forwarded to; a file descriptor.
        label: The text before each line.
        file: The file of the rank, if there is one.
    """

    def __init__(self, target: int, label: bytes, file: BinaryIO | None) -> None:
        self._target, self._label, self._file = target, label, file
        self._rest = b''  # a line without an end

    def add(self, data: bytes) -> None:
        """Forward data; empty at the end of the output."""
        *lines, self._rest = _LINE_END.split(self._rest + data)
        if not data and self._rest:
            lines, self._rest = [*lines, self._rest + b'\n'], b''
        if self._file is not None:
            with contextlib.suppress(OSError):  # the disk is full
                self._file.write(b''.join(lines))
        if self._label:
            data = b''.join([self._label + line for line in lines if line])
        with contextlib.suppress(OSError):  # closed
            while data:
                data = data[os.write(self._target, data):]


def _forward(outputs: dict[int, _RankOutput]) -> None:
    """Forward all outputs until they end.

    Args:
        outputs: By the file descriptor to read from.
    """
    while outputs:
        for source in select.select([*outputs], [], [])[0]:
            data = os.read(source, _SIZE)
            outputs[source].add(data)
            if not data:
                del outputs[source]


def _open(folder: str, rank: str, attempt: str) -> BinaryIO | None:
    """Open the file of this rank."""
    try:
        os.makedirs(folder, exist_ok=True)
        file = open(f'{folder}/rank{rank}.log', 'ab', buffering=0)  # noqa: SIM115
        file.write(f'--- attempt {attempt}, {time.strftime("%Y-%m-%d %H:%M:%S")}, host '
                   f'{os.uname().nodename}, process {os.getpid()} ---\n'.encode())
        return file
    except OSError as error:
        os.write(2, f'chainermn run: no log file of rank {rank}: {error}\n'.encode())
    return None


def main(attempt: str, is_labeled: str, folder: str, *program: str) -> None:
    """Replace this process by the program."""
    rank = next((os.environ[name] for name in _RANKS if name in os.environ), '0')
    label = f'[{rank}] '.encode() if is_labeled == '1' else b''
    file = _open(folder, rank, attempt) if folder else None
    pipes = [os.pipe() for _ in range(2)]
    if os.fork() == 0:
        # Start a new session, since mpiexec kills the group of the rank. Make the process an
        # orphan, since the program may wait for all of its children.
        os.setsid()
        if os.fork() == 0:
            kept = {1, 2, *(source for source, _ in pipes), *([] if file is None else [
                file.fileno()])}
            for each in os.listdir('/proc/self/fd'):  # such as sockets of mpiexec
                if int(each) not in kept:
                    with contextlib.suppress(OSError):
                        os.close(int(each))
            os.chdir('/')
            _forward({source: _RankOutput(target, label, file)
                      for target, (source, _) in enumerate(pipes, 1)})
        os._exit(0)
    os.wait()
    for target, (source, sink) in enumerate(pipes, 1):
        os.close(source)
        os.dup2(sink, target)
    os.execvp(program[0], program)  # other files are closed


if __name__ == '__main__':
    main(*sys.argv[1:])
