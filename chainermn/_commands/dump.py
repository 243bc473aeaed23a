"""``chainermn dump``: print what all ranks of a job are doing."""
from __future__ import annotations

import argparse
import contextlib
import os

from chainermn._commands import running_ranks
from chainermn._commands.top import jobs

_DESCRIPTION = """\
Prints what all ranks of a running job are doing: their current and last operations, and
their stacks. The job continues. The report appears in the output of the job.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument('pid', type=int, metavar='PID',
                        help='process ID of a rank on this host, or of its mpiexec')


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Notify a rank and return the exit status."""
    if not os.path.exists(f'/proc/{options.pid}'):
        parser.error(f'there is no process {options.pid}')
    found = jobs.below(options.pid)
    if len(found) > 1:
        parser.error(f'several jobs run under process {options.pid}; select one by its PID:\n'
                     f'{jobs.text(found)}')
    for process in running_ranks.below(options.pid):
        with contextlib.suppress(OSError):  # it has exited
            running_ranks.request(process, b'1')
            print(f'Notified the rank in process {process}; the report appears in the output of '
                  'the job.')
            return 0
    parser.error(f'neither process {options.pid} nor any of its children is a rank of yours that '
                 'has created a communicator')
