"""``chainermn dump``: print what all ranks of a job are doing."""
from __future__ import annotations

import argparse
import contextlib
import os
import pathlib

_DESCRIPTION = """\
Prints what all ranks of a running job are doing: the current and the last operations, and
the stacks. The job continues. The report appears in the output of the job.
"""
_FILE = '/memfd:chainermn-dump'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument('pid', type=int, metavar='PID',
                        help='process ID of a rank on this host, or of its mpiexec')


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Notify a rank; return the exit status."""
    if not os.path.exists(f'/proc/{options.pid}'):
        parser.error(f'there is no process {options.pid}')
    for process in _descendants(options.pid):
        with contextlib.suppress(OSError):  # of another user, or it has ended
            for path in pathlib.Path(f'/proc/{process}/fd').iterdir():
                if os.readlink(path).startswith(_FILE):
                    path.write_bytes(b'1')
                    print(f'Notified the rank in process {process}; the report appears in the '
                          'output of the job.')
                    return 0
    parser.error(f'process {options.pid} and its children contain no rank of yours that has '
                 'created a communicator')


def _descendants(process: int) -> list[int]:
    """Return a process and all of its descendants, parents before children."""
    children: dict[int, list[int]] = {}
    for path in pathlib.Path('/proc').glob('[0-9]*/stat'):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(')')[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [process]
    for each in found:
        found += children.get(each, [])
    return found
