"""``chainermn top``: show the ranks of a running job in a table that is updated every second."""
from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence

from chainermn._commands.top import connection, jobs, table
from chainermn._commands.top.table import Row

_DESCRIPTION = """\
Shows a running job, without restarting it: for each rank the number of updates, updates per
second, the shares of its time, and memory. Rates and shares are those of the last 10 seconds.
Run it on a host of the job, as the user of the job. Ctrl-C ends it; the job continues.
"""

_EPILOG = """\
columns:
  data      loading batches: Chainer's iterators and converters, or comm.span('data')
  forward   computing the loss in optimizer.update(loss_function, ...)
  backward  computing gradients there
  exchange  communication
  waiting   waiting for other ranks
  update    the step of the actual optimizer
  other     all else, such as evaluation, or computation outside of optimizer.update
  state     "straggler": the others wait for this rank; what a rank has waited for

Without a terminal and with --json, it prints the state once, unless -n is given.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument('job', nargs='?', metavar='PID_OR_JOB',
                        help='process ID of a rank on this host or of its mpiexec, job ID of '
                             'Slurm, or file name of the program (default: the only job)')
    parser.add_argument('-n', type=int, metavar='N', help='end after N updates of the table')
    parser.add_argument('--json', action='store_true',
                        help='print one line of JSON per update instead of a table')


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Show the job; return the exit status."""
    is_live = sys.stdout.isatty() and not options.json
    count = options.n if options.n is not None else 0 if is_live else 1
    try:
        job = jobs.find(options.job)
        tables = _tables(job.ranks, count)
        if is_live:
            _show_live(tables)
        else:
            for name, rows in tables:
                print(_json(name, rows) if options.json else '\n'.join(_text(name, rows)),
                      flush=True)
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


def _tables(ranks: Sequence[int], count: int) -> Iterator[tuple[str, list[Row]]]:
    """Yield the name of the job and its ranks, a number of times, or until it finishes."""
    samples, n = table.Samples(), 0
    for message in connection.messages(ranks):
        samples.add(message)
        if samples.are_complete:
            yield samples.job, samples.rows()
            n += 1
            if n == count:
                return


def _json(job: str, rows: Sequence[Row]) -> str:
    return json.dumps({'job': job, 'time': time.time(), 'ranks': [row._asdict() for row in rows]})


def _text(job: str, rows: Sequence[Row]) -> list[str]:
    lines = table.cells(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [table.summary(rows, job), *(
        '  '.join([*map(str.rjust, line[:-1], widths), line[-1]]).rstrip() for line in lines)]


def _show_live(tables: Iterator[tuple[str, list[Row]]]) -> None:
    """Show the newest table in the terminal, with rich if it is installed."""
    try:
        from chainermn._commands.top.rich_table import Display
    except ImportError:
        for name, rows in tables:
            width, height = shutil.get_terminal_size()
            shown, more = table.select(rows, height - 4)
            lines = [line[:width] for line in [*_text(name, shown), more] if line]
            print('\x1b[H\x1b[J' + '\n'.join(lines), flush=True)
        return
    with Display() as display:
        for name, rows in tables:
            display.show(name, rows)
