"""Runs the tests at 1, 2 and 3 ranks: ``python tests/run_ranks.py [--ranks 2,4] [options]``.

All tests run at 1 and 3 ranks. At 2 ranks, only tests marked ``every_size`` run, unless ``--ranks``
is given. With one rank, pytest-xdist runs two workers per core, up to 8. Other options are passed
to pytest. The script stops after the first failed run. With ``--keep-going``, it continues, and
lists the failed runs at the end.

If there are several runs, it prints the cost of each. It fails if a folder has exceeded its budget
(durations.py).
"""

import argparse
import ctypes
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import time

import durations
import host_compiler
from time_limits import seconds

# Seconds after which a run is killed. The time limit of a test (conftest.py) comes first, unless
# MPI itself hangs at startup or shutdown.
RUN_LIMIT = 2400
STACKS = 'CHAINERMN_TEST_STACKS'  # the folder to which conftest.py writes

RUNS = {1: [], 2: ['-m', 'every_size'], 3: []}
# Tests that start jobs wait for them most of the time.
WORKERS = min(2 * len(os.sched_getaffinity(0)), 8)
# worksteal mostly keeps the tests of a file together, since they may share expensive fixtures.
PARALLEL = ['--numprocesses', str(WORKERS), '--dist', 'worksteal']

# The ranks share the machine's cores: each has one thread, which sleeps while MPICH waits.
SHARED = dict.fromkeys(['OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS',
                        'MPIR_CVAR_ENABLE_HEAVY_YIELD'], '1')

# Nanoseconds by which the kernel may prolong a sleep. MPICH's HEAVY_YIELD sleeps repeatedly for a
# moment. Longer sleeps leave more CPU time to other programs, but slow down communication. In
# programs that tests start, ranks mostly wait for others to start.
LONG_SLACK = 1_000_000
PR_SET_TIMERSLACK = 29

INSIDE_PYTEST = re.compile(r'/(_pytest|pluggy|xdist|execnet)/|<frozen runpy>|<string>')


def run(ranks: int, options: list[str]) -> tuple[int, dict[str, durations.Cost]]:
    """Run pytest on ``ranks`` ranks; return its exit status and the cost of each test."""
    command = [sys.executable, '-m', 'pytest', '-p', 'no:cacheprovider']
    if ranks > 1:
        command = [_mpiexec(), '-n', str(ranks), *command, '--with-mpi', *options]
    else:
        command += [*PARALLEL, *options]
    print(f'\n{f" {ranks} rank" + "s" * (ranks > 1) + " ":#^80}', flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        env = SHARED | os.environ | {STACKS: folder}
        # The mpiexec next to this Python, even if its environment is not active.
        env['PATH'] = os.path.dirname(sys.executable) + os.pathsep + env.get('PATH', os.defpath)
        env.pop('PYTHONHASHSEED', None)  # set by tox; users' ranks iterate sets in different orders
        env.pop('PYTHONUNBUFFERED', None)  # it would mix the lines of different ranks
        stdin = None if ranks == 1 else subprocess.DEVNULL  # one rank may use --pdb
        _set_timer_slack(LONG_SLACK if ranks == 1 else 0)
        with subprocess.Popen(command, env=env, stdin=stdin) as process:
            try:
                status = process.wait(seconds(RUN_LIMIT))
            except subprocess.TimeoutExpired:
                process.terminate()  # mpiexec ends its ranks
                status = process.wait()
        measured = durations.recorded(folder)
        files = sorted(path for path in pathlib.Path(folder).iterdir()
                       if not path.name.startswith(durations.PREFIX))
        reports = {file.name: file.read_text().splitlines() or ['nothing'] for file in files}
    for rank, (name, *stacks) in reports.items():
        if stacks:
            print(f'\n{f" rank {rank} took too long in {name} ":_^80}')
            print(outside_pytest(stacks))
    if status != 0 and reports.get('0') != [f'ending with {status}']:
        # pytest's last line is missing or wrong.
        where = ''.join(f'\n  rank {rank}: {name}' for rank, (name, *_) in reports.items())
        print(f'\nThe run ended with status {status}. The ranks were in{where}')
        print(f'{f" 1 error in {time.monotonic() - start:.2f}s ":=^80}', flush=True)
    return status, measured


def _set_timer_slack(nanoseconds: int) -> None:
    """Set by how much sleeps may be prolonged, also in new processes; 0 is the default."""
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, nanoseconds, 0, 0, 0)


def cpu_seconds() -> float:
    """Return the CPU time of all programs that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def outside_pytest(stacks: list[str]) -> str:
    """Return the lines of stacks without those of pytest."""
    return '\n'.join(line for line in stacks if not INSIDE_PYTEST.search(line))


def _mpiexec() -> str:
    """Return the mpiexec next to this Python, or the first one on PATH."""
    next_to_python = os.path.join(os.path.dirname(sys.executable), 'mpiexec')
    return next_to_python if os.path.exists(next_to_python) else 'mpiexec'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument('--ranks', help='numbers of ranks at which to run all tests, such as 2,3')
    parser.add_argument('--keep-going', action='store_true', help='continue after a failed run')
    parser.add_argument('--measure', type=pathlib.Path, metavar='FILE',
                        help='write the cost of each test, for durations.py')
    args, options = parser.parse_known_args()
    runs = {int(n): [] for n in args.ranks.split(',')} if args.ranks else RUNS
    failed, measured, costs = {}, {}, []
    with tempfile.TemporaryDirectory() as os.environ[host_compiler.VARIABLE]:
        for ranks, chosen in runs.items():
            start, cpu = time.monotonic(), cpu_seconds()
            status, measured[ranks] = run(ranks, [*chosen, *options])
            costs.append(f'{ranks} rank{"s" * (ranks > 1)}: {time.monotonic() - start:.0f} s, '
                         f'{cpu_seconds() - cpu:.0f} CPU seconds')
            if status != 0:
                failed[ranks] = status if 0 < status < 128 else 1
                if not args.keep_going:
                    break
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
