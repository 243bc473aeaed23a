"""Runs the tests at 1, 2, 3 and 4 ranks: ``python tests/run_ranks.py [--ranks 2,4] [options]``.

All tests run at 1 and 3 ranks; at 2 and 4 ranks only tests marked ``every_size``.  With one rank,
pytest-xdist runs two workers per core, up to 8; these tests mostly wait for programs that they
start, so the runs on several ranks use the time, one after another, and are printed afterwards.
With ``--ranks`` all tests run at these numbers, one after another.  Other options are passed to
pytest.  After a failed run no other one starts; with ``--keep-going`` all run, and failed ones are
listed at the end.

Prints what each of several runs cost.  Fails if a folder has outgrown its budget (durations.py).
"""

import argparse
import concurrent.futures
import contextlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time
from typing import NamedTuple, TextIO

import durations
import host_compiler
from time_limits import seconds

# Seconds after which a run is killed. The time limit of a test (conftest.py) comes first, unless
# MPI itself hangs at startup or shutdown.
RUN_LIMIT = 2400
STACKS = 'CHAINERMN_TEST_STACKS'  # the folder to which conftest.py writes

RUNS = {1: [], 2: ['-m', 'every_size'], 3: [], 4: ['-m', 'every_size']}
# Tests that start jobs wait for them most of the time.
WORKERS = min(2 * len(os.sched_getaffinity(0)), 8)
# worksteal mostly keeps the tests of a file together, since they may share expensive fixtures.
PARALLEL = ['--numprocesses', str(WORKERS), '--dist', 'worksteal']

# The ranks share the machine's cores: each has one thread, which sleeps while MPICH waits.
SHARED = dict.fromkeys(['OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS',
                        'MPIR_CVAR_ENABLE_HEAVY_YIELD'], '1')

INSIDE_PYTEST = re.compile(r'/(_pytest|pluggy|xdist|execnet)/|<frozen runpy>|<string>')


class Result(NamedTuple):
    """What a run of pytest on one number of ranks gave."""

    status: int
    tests: dict[str, durations.Cost]
    seconds: float
    cpu: float  # seconds, with all programs that the tests started and waited for


def run(ranks: int, options: list[str], out: TextIO) -> Result:
    """Runs pytest on ``ranks`` ranks, which writes to ``out``."""
    command = [sys.executable, '-m', 'pytest', '-p', 'no:cacheprovider']
    if ranks > 1:
        command = [_mpiexec(), '-n', str(ranks), *command, '--with-mpi', *options]
    else:
        command += [*PARALLEL, *options]
    print(f'\n{f" {ranks} rank" + "s" * (ranks > 1) + " ":#^80}', file=out, flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        env = SHARED | os.environ | {STACKS: folder}
        # The mpiexec next to this Python, even if its environment is not active.
        env['PATH'] = os.path.dirname(sys.executable) + os.pathsep + env.get('PATH', os.defpath)
        env.pop('PYTHONHASHSEED', None)  # tox sets one; ranks of a user iterate sets in many orders
        env.pop('PYTHONUNBUFFERED', None)  # would mix the lines of different ranks
        stdin = None if ranks == 1 else subprocess.DEVNULL  # one rank may use --pdb
        with subprocess.Popen(command, env=env, stdin=stdin, stdout=out, stderr=out) as process:
            limit = threading.Timer(seconds(RUN_LIMIT), process.terminate)  # mpiexec ends its ranks
            limit.start()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = status = os.waitstatus_to_exitcode(status)
            limit.cancel()
        measured = durations.recorded(folder)
        files = sorted(path for path in pathlib.Path(folder).iterdir()
                       if not path.name.startswith(durations.PREFIX))
        reports = {file.name: file.read_text().splitlines() or ['nothing'] for file in files}
    took = time.monotonic() - start
    for rank, (name, *stacks) in reports.items():
        if stacks:
            print(f'\n{f" rank {rank} took too long in {name} ":_^80}', file=out)
            print(outside_pytest(stacks), file=out)
    if status != 0 and reports.get('0') != [f'ending with {status}']:
        # pytest's last line is missing or wrong.
        where = ''.join(f'\n  rank {rank}: {name}' for rank, (name, *_) in reports.items())
        print(f'\nThe run ended with status {status}. The ranks were in{where}', file=out)
        print(f'{f" 1 error in {took:.2f}s ":=^80}', file=out)
    out.flush()
    return Result(status, measured, took, usage.ru_utime + usage.ru_stime)


def run_all(runs: dict[int, list[str]], beside: bool, keep_going: bool) -> dict[int, Result]:
    """Runs pytest with these options on these numbers of ranks, perhaps beside the run on one."""
    results: dict[int, Result] = {}

    def run_next(ranks: int, out: TextIO) -> None:
        if keep_going or not any(result.status for result in results.values()):
            results[ranks] = run(ranks, runs[ranks], out)

    if not beside:
        for ranks in runs:
            run_next(ranks, sys.stdout)
        return results
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(1) as thread:
        others = {ranks: stack.enter_context(tempfile.TemporaryFile('w+'))
                  for ranks in runs if ranks > 1}
        futures = [thread.submit(run_next, ranks, out) for ranks, out in others.items()]
        run_next(1, sys.stdout)
        for future, out in zip(futures, others.values(), strict=True):
            future.result()
            out.seek(0)
            print(out.read(), end='', flush=True)
    return results


def outside_pytest(stacks: list[str]) -> str:
    """Returns the lines of stacks without those of pytest."""
    return '\n'.join(line for line in stacks if not INSIDE_PYTEST.search(line))


def _mpiexec() -> str:
    """The mpiexec next to this Python, or the first one on PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), 'mpiexec')
    return beside if os.path.exists(beside) else 'mpiexec'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument('--ranks', help='numbers of ranks at which to run all tests, such as 2,3')
    parser.add_argument('--keep-going', action='store_true', help='continue after a failed run')
    parser.add_argument('--measure', type=pathlib.Path, metavar='FILE',
                        help='write the cost of each test, for durations.py')
    args, options = parser.parse_known_args()
    runs = {int(n): [] for n in args.ranks.split(',')} if args.ranks else RUNS
    with tempfile.TemporaryDirectory() as os.environ[host_compiler.VARIABLE]:
        results = run_all({ranks: [*chosen, *options] for ranks, chosen in runs.items()},
                          runs is RUNS, args.keep_going)
    measured = {ranks: result.tests for ranks, result in sorted(results.items())}
    failed = {ranks: result.status if 0 < result.status < 128 else 1
              for ranks, result in sorted(results.items()) if result.status != 0}
    costs = [f'{ranks} rank{"s" * (ranks > 1)}: {result.seconds:.0f} s, '
             f'{result.cpu:.0f} CPU seconds' for ranks, result in sorted(results.items())]
    if len(costs) > 1:
        print('', *costs, sep='\n')
    if args.keep_going and failed:
        print(f'\nFailed at these numbers of ranks: {", ".join(map(str, failed))}')
    if args.measure:
        durations.write_tests(measured, args.measure)
    elif runs is RUNS and '--full' not in options:
        grown = durations.grown(durations.by_file(measured), durations.read())
        for line in grown:
            print(line)
        if grown and not failed:
            print('Shorten these tests, or measure again: see tests/durations.py')
            return 1
    return next(iter(failed.values()), 0)


if __name__ == '__main__':
    sys.exit(main())
