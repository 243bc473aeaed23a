"""``chainermn top``: show the ranks of a running job in a table that is updated every second."""
from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence

from chainermn._commands.options import at_least
from chainermn._commands.top import connection, display, jobs, table
from chainermn._commands.top.jobs import RunningJob
from chainermn._commands.top.table import TableRow

_DESCRIPTION = """\
Shows a running job, which needs no preparation: for each rank, the number of updates, the
updates per second, how the rank spends its time, and memory. Rates and shares cover the last
10 seconds. Run this command on a host of the job, as the user who started the job. Ctrl-C
exits; the job continues.
"""

_EPILOG = """\
columns:
  data           loading batches: Chainer's iterators and converters, or comm.span('data')
  forward        computing the loss in optimizer.update(loss_function, ...)
  backward       computing gradients in optimizer.update(loss_function, ...)
  communication  sending and receiving, including packing gradients
  waiting        waiting for other ranks
  update         the step of the actual optimizer
  other          everything else, such as evaluation or computation outside of optimizer.update
  CPU            100 % is one core
  GPU            share of time in which the GPU is busy, from NVML
  VRAM           used GPU memory, from NVML; without NVML, the memory allocated by CuPy's pool
  state          "straggler" if the others wait for this rank; the operation in which the rank waits

If the output is piped or --json is given, the table is printed once, unless -n is given. In a
terminal, if rich is installed, the table is updated in place, and the states are listed above
the table.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument('job', nargs='?', metavar='PID_OR_JOB',
                        help='process ID of a rank on this host or of its mpiexec, Slurm job ID, '
                             'or script, of which only the file name is compared (default: the '
                             'only job on this host)')
    parser.add_argument('-n', type=at_least(1), metavar='N',
                        help='exit after N updates of the table')
    parser.add_argument('--json', action='store_true',
                        help='print one line of JSON per update instead of a table')


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Show the job and return the exit status."""
    is_endless = sys.stdout.isatty() and not options.json
    count = options.n if options.n is not None else 0 if is_endless else 1
    try:
        job = jobs.find(options.job)
        tables = _tables(job, count)
        if options.json:
            for rows in tables:
                print(_json(job.name, rows), flush=True)
        else:
            display.show(job.name, tables)
        if not count:
            print('the job has finished')
    except jobs.NoJobError as error:
        parser.error(str(error))
    except connection.LostError as error:
        print(f'chainermn top: {error}', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _tables(job: RunningJob, count: int) -> Iterator[list[TableRow]]:
    """Yield the table of a job ``count`` times; until the job finishes if ``count`` is 0."""
    samples, n = table.Samples(), 0
    with contextlib.closing(connection.messages(job.ranks)) as messages:
        for message in messages:
            samples.add(message)
            if samples.are_complete:
                yield samples.rows()
                n += 1
                if n == count:
                    return


def _json(job: str, rows: Sequence[TableRow]) -> str:
    return json.dumps({'job': job, 'time': time.time(), 'ranks': [row._asdict() for row in rows]})
