"""Runs deadlocks on real processes, and checks which ranks, operations and lines are reported.

``python tests/reliability/deadlocks.py [--only TEXT] [--slice 1/4] [--jobs 2] [--python PYTHON]
[--results FILE [--missing]] [--docs docs/test_results.md]``

A case passes if mpiexec ends within 5 seconds (more on a slow machine) with a nonzero status, after
one message that lists the ranks, operations and lines of the deadlock, and if no process is left.
``CHAINERMN_TIMEOUT`` is not set. For another MPI library, pass the Python of an environment with
it; ``--docs`` writes one table for all libraries in the file of results.
"""

from __future__ import annotations

import functools
import pathlib
import re
import sys
import tempfile
import time
from typing import NamedTuple

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import deadlock_program  # noqa: E402, F401  (imports the catalogue)
import job_results  # noqa: E402
from deadlock_case import CASES, Deadlock, Wait  # noqa: E402
from fault_matrix import left_behind, ranks_in  # noqa: E402
from job_results import Result  # noqa: E402
from time_limits import seconds  # noqa: E402

from chainermn._process import mpiexec  # noqa: E402

COMMUNICATORS = ('naive', 'flat')
# Seconds on an idle machine.
WITHIN = 5
TIMEOUT = 2  # for cases that only a timeout ends
HANGS = 20
BEGIN = '<!-- written by deadlocks.py -->'


class Job(NamedTuple):
    """A case on a communicator, with a number of ranks and an MPI library."""

    name: str
    communicator: str
    ranks: int
    mpi: str

    def __str__(self) -> str:
        return job_results.name_of(self)


def jobs(mpi: str = '') -> list[Job]:
    """All jobs with an MPI library."""
    return [Job(name, communicator, ranks, mpi) for name, case in CASES.items()
            for ranks in case.ranks for communicator in COMMUNICATORS]


def run(job: Job, python: str, limit: float = HANGS) -> Result:
    """Run one job.

    Args:
        job: The job.
        python: A Python with its MPI library.
        limit: After this number of seconds it hangs.
    """
    with tempfile.TemporaryDirectory(prefix='deadlocks-') as folder:
        env = mpiexec.environment(job.ranks) | {'OMP_NUM_THREADS': '1', 'FAULT_MATRIX': folder}
        env.pop('CHAINERMN_TIMEOUT', None)
        case = CASES[job.name]
        if case.needs_timeout:
            env['CHAINERMN_TIMEOUT'] = str(seconds(TIMEOUT))
        process = job_results.start(
            [str(pathlib.Path(python).with_name('mpiexec')), '-n', str(job.ranks), python,
             '-W', 'ignore', str(HERE / 'deadlock_program.py'), job.name, job.communicator,
             folder], env)
        output, hangs = job_results.finish(process, seconds(limit))
        ended = time.time()
        begun = [float(path.read_text()) for path in pathlib.Path(folder).glob('when-*')]
        took = ended - max(begun) if len(begun) == job.ranks else 0.
        problem = ('hangs' if hangs else 'no deadlock' if len(begun) < job.ranks else
                   'status 0' if process.returncode == 0 else
                   _problem_of_timeout(case, output) if case.needs_timeout else
                   problem_of_report(case, output))
        if not problem and took > seconds(WITHIN + case.needs_timeout * TIMEOUT):
            problem = f'{took:.1f} s'
        if left := left_behind(folder, []):
            problem = problem or f'left: {left}'
    return Result(problem, took, output)


def _problem_of_timeout(case: Deadlock, output: str) -> str:
    """Return what is wrong with the report after the timeout, or ''."""
    if ' aborts the job: no progress for ' not in output:
        return 'other message'
    missing = [wait for own in case.waits().values() for wait in own
               if f'called at {wait.line} ' not in output]
    return f'{missing[0].line} is not named' if missing else ''


def problem_of_report(case: Deadlock, output: str) -> str:
    """Return what is wrong with the report, or ''."""
    messages = re.findall(r'^chainermn: .*$', output, re.MULTILINE)
    if len(messages) != 1:
        return f'{len(messages)} messages'
    found = re.fullmatch(r'chainermn: rank \d of \d \(host \S+, process \d+\) aborts the job: '
                         'deadlock: (.*)', messages[0])
    if found is None:
        return 'other message'
    named: list[tuple[int, set[int]]] = []
    waits = case.waits()
    for text in found[1].split('; '):
        wait = re.fullmatch(r'rank (\d) waits in ([^#(]*[^#( ])(?: #(.*))? '
                            r'\((\w+\.py:\d+)(?: in .*)?\) for (ranks? [\d, -]+)', text)
        if wait is None:
            return f'other message: {text}'
        rank, awaited = int(wait[1]), ranks_in(wait[5])
        named.append((rank, awaited))
        if rank not in waits:
            return f'rank {rank} is named'
        problems = [_problem_of_wait(one, wait[4], wait[2], awaited - {case.n, case.n + 1})
                    for one in waits[rank]]
        if all(problems):
            return f'rank {rank} {problems[0]}'
    return _problem_of_cycle(waits, named) or ('' if '\nStacks of ' in output else 'no stacks')


def _problem_of_wait(wait: Wait, line: str, operation: str, awaited: set[int]) -> str:
    """Return how a wait differs from the expected one, or ''.

    Args:
        wait: The expected wait.
        line: File and line number.
        operation: The operation.
        awaited: The ranks, without bystanders, which may have to take part.
    """
    if line != wait.line:
        return f'is at {wait.line}, not {line}'
    if operation != wait.operation:
        return f'is in {wait.operation}, not {operation}'
    # A rank that has waited for a short time only is not known to be a part of the deadlock.
    if awaited != wait.ranks if wait.is_any else not awaited <= wait.ranks:
        return f'waits for {sorted(wait.ranks)}, not {sorted(awaited)}'
    return ''


def _problem_of_cycle(waits: dict[int, list[Wait]], named: list[tuple[int, set[int]]]) -> str:
    """Return why the reported ranks are not the deadlock, or ''."""
    ranks = [rank for rank, _ in named]
    if missing := {rank for rank, own in waits.items()
                   if any(wait.is_part for wait in own)} - {*ranks}:
        return f'ranks {sorted(missing)} are not named'
    if any(after not in awaited for (_, awaited), after in zip(
            named, ranks[1:] + ranks[:1], strict=True)):
        return f'ranks {ranks} are no cycle'
    return ''


def table(results: dict[Job, Result]) -> str:
    """The table of results: one line per deadlock, one column per MPI library."""
    libraries = sorted({job.mpi for job in results})
    lines = ['| deadlock | ranks | ' + ' | '.join(libraries) + ' |',
             '|---' * (2 + len(libraries)) + '|']
    for name, case in CASES.items():
        if all(job.name != name for job in results):
            continue
        cells = [job_results.cell([result for job, result in results.items()
                                   if job.name == name and job.mpi == mpi]) for mpi in libraries]
        note = ' (timeout)' if case.needs_timeout else ''
        lines.append(f'| {name}{note} | {", ".join(map(str, case.ranks))} | '
                     + ' | '.join(cells) + ' |')
    numbers, wrong = job_results.summary(results)
    longest = job_results.longest([result for job, result in results.items()
                                   if not CASES[job.name].needs_timeout])
    lines += ['', f'{len(CASES)} deadlocks in {len(results)} jobs: {numbers}; without a timeout, '
              f'the longest took {longest:.1f} s.', *wrong]
    return '\n'.join(lines)


def main() -> int:
    """Run the jobs and print the table."""
    parser = job_results.parser_of(__doc__.splitlines()[0])
    parser.add_argument('--python', default=sys.executable, metavar='PYTHON',
                        help='Python of another environment; default: this one')
    parser.add_argument('--limit', type=float, default=HANGS, metavar='SECONDS',
                        help='time until a job counts as hung; default: %(default)s')
    args = parser.parse_args()
    sizes = [*map(int, args.ranks.split(','))]
    results = job_results.run_all(
        args, [job for job in jobs(job_results.mpi_library(args.python)) if job.ranks in sizes],
        Job, functools.partial(run, python=args.python, limit=args.limit))
    return job_results.show(args, results, table(results), BEGIN,
                            sorted({job.mpi for job in results}))


if __name__ == '__main__':
    sys.exit(main())
