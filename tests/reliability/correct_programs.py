"""Runs random correct programs, which must not be taken for deadlocks.

``python tests/reliability/correct_programs.py [--count 1000] [--seed 0] [--ranks 2,3,4]
[--jobs 8] [--python PYTHON] [--last NAME]``

Each job plays several programs. One rank of each is late by up to 5 seconds: in user code, a
thread, mpi4py, pickling, a debugger; or it is stopped. With ``--last``, each job consists of one
operation, after which the ranks end seconds apart. A job passes if it ends with status 0 and
ChainerMN reports nothing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import pathlib
import sys
import time
from typing import NamedTuple

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import job_results  # noqa: E402
from correct_last import OPERATIONS  # noqa: E402
from time_limits import seconds  # noqa: E402

from chainermn._process import mpiexec  # noqa: E402

PER_JOB = 20
LONGEST = 5  # seconds that a rank is late
HANGS = 15  # seconds per program, on an idle machine


class Job(NamedTuple):
    """Some programs of a seed."""

    seed: int
    ranks: int
    first: int
    number: int
    longest: float = LONGEST
    last: str = ''

    def __str__(self) -> str:
        programs = f'--last {self.last!r}' if self.last else (
            f'--first {self.first} --count {self.number}')
        return f'--seed {self.seed} --ranks {self.ranks} {programs}'


def run(job: Job, python: str = sys.executable) -> tuple[str, str]:
    """Run a job; return what is wrong, or '', and its output."""
    env = mpiexec.environment(job.ranks) | {'OMP_NUM_THREADS': '1'}
    env.pop('CHAINERMN_TIMEOUT', None)
    process = job_results.start(
        [str(pathlib.Path(python).with_name('mpiexec')), '-n', str(job.ranks), python,
         '-W', 'ignore', str(HERE / 'correct_program.py'),
         *map(str, (job.seed, job.first, job.number, job.longest)), job.last], env)
    output, hangs = job_results.finish(process, seconds(50 + HANGS * job.number))
    if hangs:
        return 'hangs', output
    problem = (f'status {process.returncode}' if process.returncode else
               'a message' if 'chainermn:' in output else '')
    return problem, output


def main() -> int:
    """Run the jobs and count programs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--count', type=int, default=1000,
                        help='number of programs; default: %(default)s')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--first', type=int, default=0, help='number of the first program')
    parser.add_argument('--ranks', default='2,3,4', help='default: %(default)s')
    parser.add_argument('--jobs', type=int, default=8, help='jobs at a time; default: %(default)s')
    parser.add_argument('--python', default=sys.executable, metavar='PYTHON',
                        help='Python of another environment; default: this one')
    parser.add_argument('--last', metavar='NAME',
                        help='run each operation whose name contains this as the last one')
    args = parser.parse_args()
    sizes = itertools.cycle(map(int, args.ranks.split(',')))
    end = args.first + args.count
    chosen = [Job(args.seed, next(sizes), first, min(PER_JOB, end - first))
              for first in range(args.first, end, PER_JOB)]
    if args.last is not None:
        chosen = [Job(args.seed, next(sizes), 0, 0, last=name) for name in OPERATIONS
                  if args.last in name]
    start, n_wrong = time.perf_counter(), 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for job, (problem, output) in zip(
                chosen, pool.map(lambda job: run(job, args.python), chosen), strict=True):
            print(f'{job}: {problem or "right"}', flush=True)
            if problem:
                n_wrong += 1
                print(output, flush=True)
    count = sum(job.number or 1 for job in chosen)
    print(f'{count} programs in {len(chosen)} jobs, {n_wrong} with a problem; '
          f'{time.perf_counter() - start:.0f} s')
    return int(n_wrong > 0)


if __name__ == '__main__':
    sys.exit(main())
