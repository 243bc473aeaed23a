"""Runs deadlocks on real processes, and checks which ranks, operations and lines are reported.

``python tests/reliability/deadlocks.py [--only TEXT] [--slice 1/4] [--jobs 2] [--python PYTHON]
[--results FILE [--missing]] [--docs docs/test_results.md]``

A case passes if mpiexec ends within 5 seconds (more on a slow machine) with a nonzero status, after
one message that names the ranks, operations and lines of the deadlock, and if no process is left.
``CHAINERMN_TIMEOUT`` is not set.  For another MPI library, pass the Python of an environment with
it; ``--docs`` writes one table for all libraries in the file of results.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import deadlock_program  # noqa: E402, F401  (imports the catalogue)
from deadlock_case import CASES, Deadlock, Wait  # noqa: E402
from fault_matrix import left_behind, machine, mpi_library, ranks_in  # noqa: E402
from time_limits import seconds  # noqa: E402

from chainermn._process import mpiexec  # noqa: E402

COMMUNICATORS = ('naive', 'flat')
# Seconds on an idle machine.
WITHIN = 5
TIMEOUT = 2  # for cases that only a timeout ends
HANGS = 20
BEGIN, END = '<!-- written by deadlocks.py -->', '<!-- until here -->'


class Job(NamedTuple):
    """A case on a communicator, with a number of ranks and an MPI library."""

    name: str
    communicator: str
    ranks: int
    mpi: str

    def __str__(self) -> str:
        return ' / '.join(map(str, filter(None, self)))


class Result(NamedTuple):
    """The outcome of a job."""

    problem: str  # '' if it passed
    seconds: float  # from the deadlock to the end of mpiexec
    output: str


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
        process = subprocess.Popen(
            [str(pathlib.Path(python).with_name('mpiexec')), '-n', str(job.ranks), python,
             '-W', 'ignore', str(HERE / 'deadlock_program.py'), job.name, job.communicator, folder],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors='replace',
            start_new_session=True)
        hangs = False
        try:
            output, _ = process.communicate(timeout=seconds(limit))
        except subprocess.TimeoutExpired:
            hangs = True
            os.killpg(process.pid, signal.SIGTERM)
            output, _ = process.communicate()
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
        wait = re.fullmatch(r'rank (\d) waits in (\w+)\b(.*) \((\w+\.py:\d+)(?: in .*)?\) '
                            r'for (ranks? [\d, -]+)', text)
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
    """Return why the named ranks are not the deadlock, or ''."""
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
        cells = []
        for mpi in libraries:
            those = [result for job, result in results.items()
                     if job.name == name and job.mpi == mpi]
            right = sum(not result.problem for result in those)
            longest = max((result.seconds for result in those), default=0.)
            cells.append(f'{right}/{len(those)}, {longest:.1f} s' if those else '')
        note = ' (timeout)' if case.needs_timeout else ''
        lines.append(f'| {name}{note} | {", ".join(map(str, case.ranks))} | '
                     + ' | '.join(cells) + ' |')
    wrong = [(job, result) for job, result in results.items() if result.problem]
    hangs = sum(result.problem == 'hangs' for _, result in wrong)
    longest = max((result.seconds for job, result in results.items()
                   if not CASES[job.name].needs_timeout), default=0.)
    lines += ['', f'{len(CASES)} deadlocks in {len(results)} jobs: {len(results) - len(wrong)} '
              f'ended correctly, {hangs} hung; without a timeout, the longest took '
              f'{longest:.1f} s.']
    lines += [f'- {job}: {result.problem}' for job, result in wrong]
    return '\n'.join(lines)


def _load(path: pathlib.Path | None) -> dict[Job, Result]:
    if path is None or not path.exists():
        return {}
    return {Job(*job): Result(*result, '') for job, result in json.loads(path.read_text())}


def main() -> int:
    """Run the jobs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--ranks', default='2,3,4', help='default: %(default)s')
    parser.add_argument('--only', default='', help='run jobs whose name contains this')
    parser.add_argument('--slice', default='1/1', metavar='K/N',
                        help='run every N-th, from the K-th on')
    parser.add_argument('--jobs', type=int, default=1, help='jobs at a time; default: %(default)s')
    parser.add_argument('--python', default=sys.executable, metavar='PYTHON',
                        help='Python of another environment; default: this one')
    parser.add_argument('--results', type=pathlib.Path, metavar='FILE',
                        help='add the results to this JSON file')
    parser.add_argument('--docs', type=pathlib.Path, metavar='FILE',
                        help='update the table in this page')
    parser.add_argument('--missing', action='store_true',
                        help='run only jobs that did not pass in those results')
    parser.add_argument('--limit', type=float, default=HANGS, metavar='SECONDS',
                        help='time until a job counts as hung; default: %(default)s')
    args = parser.parse_args()
    k, n = map(int, args.slice.split('/'))
    sizes = [*map(int, args.ranks.split(','))]
    chosen = [job for job in jobs(mpi_library(args.python))
              if args.only in str(job) and job.ranks in sizes][k - 1::n]
    results = _load(args.results)
    if args.missing:
        chosen = [job for job in chosen if job not in results or results[job].problem]
    start = functools.partial(run, python=args.python, limit=args.limit)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for job, result in zip(chosen, pool.map(start, chosen), strict=True):
            results[job] = result
            print(f'{job}: {result.problem or "right"} ({result.seconds:.1f} s)', flush=True)
            if result.problem:
                print(re.sub('^', '    ', result.output, flags=re.MULTILINE), flush=True)
            if args.results:
                args.results.write_text(json.dumps(
                    [[job, result[:2]] for job, result in results.items()]))
    text = table(results)
    print(f'\n{text}')
    if args.docs:
        page = args.docs.read_text()
        before, _, rest = page.partition(BEGIN)
        args.docs.write_text(
            f'{before}{BEGIN}\n{text}\n\n{machine(sorted({job.mpi for job in results}))}\n'
            f'{END}{rest.partition(END)[2]}')
    return int(any(result.problem for result in results.values()))


if __name__ == '__main__':
    sys.exit(main())
