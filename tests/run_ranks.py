"""Runs the tests at 1, 2, 3 and 4 ranks: ``python tests/run_ranks.py [--ranks 2,4] [options]``.

The options are pytest's. Stops after the first run that fails, so that what pytest printed last is
what went wrong; with ``--keep-going`` it goes on, and says at the end which runs have failed.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

# A run that neither passes nor fails within this many seconds is ended. The time limit of a test
# (conftest.py) comes first, unless MPI itself hangs while it starts or ends.
RUN_LIMIT = 2400

INSIDE_PYTEST = re.compile(r'/(_pytest|pluggy)/|<frozen runpy>')


def run(ranks: int, options: list[str]) -> int:
    """Runs pytest on ``ranks`` ranks; returns its exit status."""
    command = [sys.executable, '-m', 'pytest', '-p', 'no:cacheprovider', *options]
    if ranks > 1:
        command = [_mpiexec(), '-n', str(ranks), *command, '--with-mpi']
    print(f'\n{f" {ranks} rank" + "s" * (ranks > 1) + " ":#^80}', flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        # One thread per rank: the ranks share the machine's cores.
        threads = dict.fromkeys(['OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS'], '1')
        env = threads | os.environ | {'CHAINERMN_TEST_STACKS': folder}
        # The mpiexec that was installed beside this Python, also if its environment is not active.
        env['PATH'] = os.path.dirname(sys.executable) + os.pathsep + env.get('PATH', os.defpath)
        env.pop('PYTHONHASHSEED', None)  # tox sets one; ranks of a user iterate sets in many orders
        stdin = None if ranks == 1 else subprocess.DEVNULL  # one rank may use --pdb
        with subprocess.Popen(command, env=env, stdin=stdin) as process:
            try:
                status = process.wait(RUN_LIMIT)
            except subprocess.TimeoutExpired:
                process.terminate()  # mpiexec ends its ranks
                status = process.wait()
        files = sorted(pathlib.Path(folder).iterdir())
        said = {file.name: file.read_text().splitlines() or ['nothing'] for file in files}
    for rank, (name, *stacks) in said.items():
        if stacks:
            print(f'\n{f" rank {rank} took too long in {name} ":_^80}')
            print(*(line for line in stacks if not INSIDE_PYTEST.search(line)), sep='\n')
    if status != 0 and said.get('0') != [f'ending with {status}']:
        # pytest's own last line is missing, or not true.
        where = ''.join(f'\n  rank {rank}: {name}' for rank, (name, *_) in said.items())
        print(f'\nThe run ended with status {status}. The ranks were in{where}')
        print(f'{f" 1 error in {time.monotonic() - start:.2f}s ":=^80}', flush=True)
    return status


def _mpiexec() -> str:
    """The mpiexec beside this Python, or else the first one on PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), 'mpiexec')
    return beside if os.path.exists(beside) else 'mpiexec'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument('--ranks', default='1,2,3,4', help='default: %(default)s')
    parser.add_argument('--keep-going', action='store_true', help='go on after a run that fails')
    args, options = parser.parse_known_args()
    failed = {}
    for ranks in args.ranks.split(','):
        status = run(int(ranks), options)
        if status != 0:
            failed[ranks] = status if 0 < status < 128 else 1
            if not args.keep_going:
                break
    if args.keep_going and failed:
        print(f'\nFailed at these numbers of ranks: {", ".join(failed)}')
    return next(iter(failed.values()), 0)


if __name__ == '__main__':
    sys.exit(main())
