"""Labels the lines that a rank prints and writes them to a log file of the rank.

mpiexec starts this file as a script in place of the program:
``python rank_output.py ATTEMPT IS_LABELED FOLDER PROGRAM ARGS...``. The script then replaces itself
with the program, which therefore has the process ID that mpiexec knows. A second process forwards
the output until the program and its children have closed their outputs. The script uses only the
standard library, so it starts immediately.
"""
from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import time

#: Environment variables that contain the rank, from MPICH and Slurm's PMI, Open MPI, other
#: libraries with PMIx, and Slurm.
_RANK_VARIABLES = 'PMI_RANK', 'OMPI_COMM_WORLD_RANK', 'PMIX_RANK', 'SLURM_PROCID'

_SIZE = 1 << 16  # bytes per read
_LINE_END = re.compile(rb'(?<=\n)|(?<=\r)(?!\n)')  # progress bars end lines with \r


class _LogFile:
    """The log file of the rank. It is closed if writing fails; the rank continues without it.

    Args:
        folder: The folder, which is created if it does not exist.
        rank: The rank.
    """

    def __init__(self, folder: str, rank: str) -> None:
        self._path = f'{folder}/rank{rank}.log'
        #: The file descriptor; negative if the file is closed.
        self.number = -1
        try:
            os.makedirs(folder, exist_ok=True)
            self.number = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            self._report(error)

    def write(self, data: bytes) -> None:
        """Append data; print an error, once, if this fails, for example on a full disk."""
        try:
            while data and self.number >= 0:
                data = data[os.write(self.number, data):]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.close(self.number)
            self.number = -1
            self._report(error)

    def _report(self, error: OSError) -> None:
        with contextlib.suppress(OSError):  # closed
            os.write(2, f'chainermn run: cannot write {self._path}: {error.strerror}; its output '
                        'continues on the terminal only\n'.encode(errors='surrogateescape'))


class _RankOutput:
    """The standard output or standard error of the rank.

    Args:
        target: The file descriptor to forward lines to.
        label: The text to write before each line.
        file: The log file of the rank; ``None`` for no file.
    """

    def __init__(self, target: int, label: bytes, file: _LogFile | None) -> None:
        self._target, self._label, self._file = target, label, file
        self._rest = b''  # an incomplete line

    def add(self, data: bytes) -> None:
        """Forward data; empty data marks the end of the output."""
        *lines, self._rest = _LINE_END.split(self._rest + data)
        if not data and self._rest:
            lines, self._rest = [*lines, self._rest + b'\n'], b''
        if self._file is not None:
            self._file.write(b''.join(lines))
        if self._label:
            data = b''.join([self._label + line for line in lines if line])
        with contextlib.suppress(OSError):  # closed
            while data:
                data = data[os.write(self._target, data):]


def _forward(outputs: dict[int, _RankOutput]) -> None:
    """Forward all outputs until they end.

    Args:
        outputs: The outputs, by the file descriptor to read from.
    """
    while outputs:
        for source in select.select([*outputs], [], [])[0]:
            data = os.read(source, _SIZE)
            outputs[source].add(data)
            if not data:
                del outputs[source]


def main(attempt: str, is_labeled: str, folder: str, *program: str) -> None:
    """Replace this process with the program."""
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), '0')
    label = f'[{rank}] '.encode() if is_labeled == '1' else b''
    file = _LogFile(folder, rank) if folder else None
    if file is not None:
        file.write(f'--- attempt {attempt}, {time.strftime("%Y-%m-%d %H:%M:%S")}, host '
                   f'{os.uname().nodename}, process {os.getpid()} ---\n'.encode())
    pipes = [os.pipe() for _ in range(2)]
    if os.fork() == 0:
        # Start a new session, because mpiexec kills the process group of the rank. Make this
        # process an orphan, because the program may wait for all of its children.
        os.setsid()
        if os.fork() == 0:
            kept = {1, 2, *(source for source, _ in pipes), *([] if file is None else [
                file.number])}
            for each in os.listdir('/proc/self/fd'):  # for example, sockets of mpiexec
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
    os.execvp(program[0], program)  # closes the other files


if __name__ == '__main__':
    main(*sys.argv[1:])
