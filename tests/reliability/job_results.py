"""Runs many jobs; prints, keeps and tabulates their results, for faults and deadlocks."""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

HERE = pathlib.Path(__file__).parent
END = '<!-- until here -->'

_Job = TypeVar('_Job', bound=tuple[object, ...])


class Result(NamedTuple):
    """The outcome of a job."""

    problem: str  # '' if it passed
    seconds: float  # from the fault to the end of mpiexec
    output: str


def start(command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    """Start a job in a process group of its own."""
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True, errors='replace', start_new_session=True)


def finish(process: subprocess.Popen[str], limit: float) -> tuple[str, bool]:
    """Wait for a job; return what it printed, and whether it was ended after some seconds."""
    try:
        return process.communicate(timeout=limit)[0], False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        return process.communicate()[0], True


def parser_of(description: str) -> argparse.ArgumentParser:
    """Return a parser of the options that choose jobs, and keep and show results."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument('--ranks', default='2,3,4', help='default: %(default)s')
    parser.add_argument('--only', default='', help='run jobs whose name contains this')
    parser.add_argument('--slice', default='1/1', metavar='K/N',
                        help='run every N-th, from the K-th on')
    parser.add_argument('--jobs', type=int, default=1, help='jobs at a time; default: %(default)s')
    parser.add_argument('--results', type=pathlib.Path, metavar='FILE',
                        help='add the results to this JSON file')
    parser.add_argument('--docs', type=pathlib.Path, metavar='FILE',
                        help='update the table in this page')
    parser.add_argument('--missing', action='store_true',
                        help='run only jobs that did not pass in those results')
    return parser


def run_all(args: argparse.Namespace, jobs: Sequence[_Job], kind: type[_Job],
            run: Callable[[_Job], Result]) -> dict[_Job, Result]:
    """Run the chosen jobs; return their results, and those in the file of results."""
    k, n = map(int, args.slice.split('/'))
    chosen = [job for job in jobs if args.only in name_of(job)][k - 1::n]
    results: dict[_Job, Result] = {}
    if args.results is not None and args.results.exists():
        results = {kind(*job): Result(*result, '')
                   for job, result in json.loads(args.results.read_text())}
    if args.missing:
        chosen = [job for job in chosen if job not in results or results[job].problem]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for job, result in zip(chosen, pool.map(run, chosen), strict=True):
            results[job] = result
            print(f'{name_of(job)}: {result.problem or "right"} ({result.seconds:.1f} s)',
                  flush=True)
            if result.problem:
                print(re.sub('^', '    ', result.output, flags=re.MULTILINE), flush=True)
            if args.results:
                args.results.write_text(json.dumps(
                    [[job, result[:2]] for job, result in results.items()]))
    return results


def name_of(job: tuple[object, ...]) -> str:
    """Return a job in one line."""
    return ' / '.join(map(str, filter(None, job)))


def cell(results: Sequence[Result]) -> str:
    """Return how many jobs passed, and how long the longest took."""
    right = sum(not result.problem for result in results)
    return f'{right}/{len(results)}, {longest(results):.1f} s' if results else ''


def longest(results: Sequence[Result]) -> float:
    """Return the seconds of the slowest job."""
    return max((result.seconds for result in results), default=0.)


def summary(results: dict[_Job, Result]) -> tuple[str, list[str]]:
    """Return the numbers of jobs that passed and hung, and a line for each that did not pass."""
    wrong = [(job, result) for job, result in results.items() if result.problem]
    hangs = sum(result.problem == 'hangs' for _, result in wrong)
    return (f'{len(results) - len(wrong)} ended correctly, {hangs} hung',
            [f'- {name_of(job)}: {result.problem}' for job, result in wrong])


def show(args: argparse.Namespace, results: dict[_Job, Result], table: str, begin: str,
         libraries: Sequence[str] = (), adds_machine: bool = True) -> int:
    """Print the table, and write it to a page if there is one; return the exit status."""
    print(f'\n{table}')
    if args.docs:
        page = args.docs.read_text()
        before, _, rest = page.partition(begin)
        below = f'\n\n{machine(libraries)}' * adds_machine
        args.docs.write_text(f'{before}{begin}\n{table}{below}\n{END}{rest.partition(END)[2]}')
    return int(any(result.problem for result in results.values()))


def machine(libraries: Sequence[str] = ()) -> str:
    """Describe date, commit, machine and MPI libraries (by default, the one of this Python)."""
    commit = subprocess.run(['git', 'rev-parse', '--short', 'HEAD'], cwd=HERE, text=True,
                            capture_output=True, check=False).stdout.strip() or 'unknown'
    names = ', '.join(libraries or [mpi_library(sys.executable)])
    return (f'Measured on {datetime.date.today()} at commit {commit}; '
            f'{len(os.sched_getaffinity(0))} cores, Linux {platform.release().split("-")[0]}, '
            f'Python {platform.python_version()}, {names}.')


def mpi_library(python: str) -> str:
    """Return name and version of the MPI library of a Python."""
    text = subprocess.run(
        [python, '-c', 'from mpi4py import MPI; print(MPI.Get_library_version())'],
        text=True, capture_output=True, check=True).stdout.split('\n')[0]
    return ' '.join(text.partition(',')[0].replace(':', ' ').split())
