"""``chainermn check``: show and test the installation on all ranks.

Only rank 0 prints a :class:`Report`, as text or as JSON.
"""
from __future__ import annotations

import argparse
import json
import sys
import threading

from chainermn._commands.check import shards, smoke_tests, system_info
from chainermn._commands.check.printing import print_report
from chainermn._commands.check.results import Report
from chainermn._commands.check.time_limit import TimeLimit

_DESCRIPTION = """\
Shows versions, the MPI library, GPUs and hosts, then tests every communicator with real
data. Run it in one process, or start it the way you start your job:

  chainermn check
  mpiexec -n 4 chainermn check
"""

_EPILOG = """\
The exit status is 0 if all required checks passed, and 1 otherwise; the problems are listed
at the end. GPU checks are only required on nodes with a GPU. Warnings do not change the exit
status.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument('--shards', default='', metavar='PATTERN',
                        help="also read shards such as 'train-*.npz' on all ranks; report the read "
                             'speed and broken files')
    parser.add_argument('--json', action='store_true', help='print the report as JSON')
    parser.add_argument('--svg', default='', metavar='FILE',
                        help='also save the report as an SVG image (needs rich)')
    parser.add_argument('--timeout', '--limit', type=float, default=120, metavar='SECONDS',
                        help='abort after this time and print where the check hangs '
                             '(default: %(default)s)')


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the checks. Collective: every rank calls it.

    Returns:
        The exit status, the same on all ranks: 0 if all required checks passed on all of them.
    """
    if not 0 < options.timeout < threading.TIMEOUT_MAX:
        parser.error('argument --timeout: must be a positive number of seconds')
    is_first_rank = system_info.rank() in (None, '0')
    with TimeLimit(options.timeout) as limit:
        limit.step = 'starting MPI'
        info = system_info.collect()
        mpi_comm = system_info.world()
        if mpi_comm is None:
            if is_first_rank:
                _print(Report.from_ranks([info]), options)
            return 1
        limit.step = 'comparing the ranks'
        infos = mpi_comm.gather(info)
        report = Report.from_ranks(infos) if infos is not None else None
        limit.step = 'testing the communicators'
        results = smoke_tests.run_all(limit)
        readings = None
        if options.shards:
            limit.step = f'reading {options.shards}'
            readings = mpi_comm.gather(
                shards.read(options.shards, info.host, mpi_comm.rank, mpi_comm.size))
        if report is not None:
            report.add(results)
            if readings is not None:
                shards.add_to(report, options.shards, readings)
            # With the mpiexec of a different MPI library, every process is rank 0 of 1.
            if is_first_rank:
                _print(report, options)
        passed = mpi_comm.bcast(None if report is None else not report.problems)
        limit.step = 'finalizing MPI'
        # Otherwise mpiexec would report the nonzero exit status as a failed rank.
        system_info.finalize_mpi()
    return 0 if passed else 1


def _print(report: Report, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(report.data(), indent=2))
    else:
        print_report(report, options.svg)
    sys.stdout.flush()
