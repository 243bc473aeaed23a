"""``python -m chainermn dump``: print what all ranks of a job are doing."""
from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import signal

_DESCRIPTION = """\
Prints what all ranks of a running job are doing: the current and the last operations, and
the stacks. The job continues. The report is in the output of the job.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument('pid', type=int, metavar='PID',
                        help='process ID of a rank on this host, or of its mpiexec')


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Send the signal to a rank; return the exit status."""
    if not os.path.exists(f'/proc/{options.pid}'):
        parser.error(f'there is no process {options.pid}')
    rank = next(filter(_is_rank, _descendants(options.pid)), None)
    if rank is None:
        parser.error(f'neither process {options.pid} nor its children are ranks that have created '
                     'a communicator and leave SIGUSR1 to chainermn')
    try:
        os.kill(rank, signal.SIGUSR1)
    except PermissionError:
        parser.error(f'process {rank} belongs to another user')
    print(f'Sent SIGUSR1 to the rank in process {rank}; the report is in the output of the job.')
    return 0


def _is_rank(process: int) -> bool:
    with contextlib.suppress(OSError):
        return _handles_signal(process) and 'mpi4py' in pathlib.Path(
            f'/proc/{process}/maps').read_text()
    return False


def _handles_signal(process: int) -> bool:
    for line in pathlib.Path(f'/proc/{process}/status').read_text().splitlines():
        name, _, value = line.partition(':')
        if name == 'SigCgt':
            return bool(int(value, 16) >> (signal.SIGUSR1 - 1) & 1)
    return False


def _descendants(process: int) -> list[int]:
    """Returns a process and all of its descendants, parents before children."""
    children: dict[int, list[int]] = {}
    for path in pathlib.Path('/proc').glob('[0-9]*/stat'):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(')')[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [process]
    for each in found:
        found += children.get(each, [])
    return found
