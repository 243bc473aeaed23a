"""``python -m chainermn check``: what is installed here, and whether it works on all ranks.

Only rank 0 prints.  What is found is a :class:`Report`, printed for people or as JSON.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from chainermn._check import _facts, _trials
from chainermn._check._limit import Limit
from chainermn._check._report import Report, print_report

_DESCRIPTION = """\
Shows what ChainerMN finds here: versions, the MPI library, GPUs; on which hosts the processes
run; and tries each communicator with a real exchange. Run it alone, or as a job is run:

  python -m chainermn check
  mpiexec -n 4 python -m chainermn check
"""

_EPILOG = """\
The exit status is 0 if all that is needed works, and 1 if something has to be mended, which is
listed at the end. Without a GPU, nothing that needs one is needed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Says what the command takes."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument('--json', action='store_true', help='print JSON, for programs')
    parser.add_argument('--svg', default='', metavar='FILE',
                        help='draw what is printed, too; this needs rich')
    parser.add_argument('--limit', type=float, default=120, metavar='SECONDS',
                        help='if it takes longer, say where it hangs, and end '
                             '(default: %(default)s)')


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Checks.  Collective: every rank calls it.

    Returns:
        The exit status: on every rank whether all that is needed works everywhere.
    """
    with Limit(options.limit) as limit:
        limit.stage = 'starting MPI'
        found = _facts.find()
        mpi_comm = _facts.world()
        if mpi_comm is None:
            if _facts.is_first():
                _show(Report.of([found]), options)
            return 1
        limit.stage = 'comparing the processes'
        everybody = mpi_comm.gather(found)
        report = Report.of(everybody) if everybody is not None else None
        limit.stage = 'trying the communicators'
        trials = _trials.all_communicators(limit)
        if report is not None:
            report.add(trials)
            if _facts.is_first():  # each is rank 0, where mpiexec is of another library
                _show(report, options)
        works = mpi_comm.bcast(None if report is None else not report.problems)
        limit.stage = 'ending MPI'
        _facts.end_mpi()  # or a status other than 0 would be taken for the failure of a rank
    return 0 if works else 1


def _show(report: Report, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        print_report(report, options.svg)
    sys.stdout.flush()
