"""A test run on several ranks ends, whatever one rank does, and its last line says how."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.mpi_skip  # starts mpiexec itself

HERE = pathlib.Path(__file__).parent

TESTS = """
import os, time, pytest
from mpi4py import MPI

last = MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1

def test_fine():
    assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size

@pytest.mark.limit(2)
def test_special():
    if last:
        {special}
    MPI.COMM_WORLD.barrier()

def test_after():
    pass

if last:
    {collecting}
"""


@pytest.fixture
def run(tmp_path):
    def run(special='pass', collecting='pass', options=()):
        shutil.copy(HERE / 'conftest.py', tmp_path)
        text = TESTS.format(special=special, collecting=collecting)
        tmp_path.joinpath('test_it.py').write_text(text)
        config = [f'--rootdir={tmp_path}', '-c', str(HERE.parent / 'pyproject.toml')]
        command = [sys.executable, HERE / 'run_ranks.py', '--ranks', '2,3', *options, *config,
                   tmp_path]
        env = {k: v for k, v in os.environ.items() if k != 'CHAINERMN_TEST_STACKS'}
        result = subprocess.run(
            command, env=env, text=True, check=False, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT)
        closing = re.findall(r'^=+ (.*) in [\d.]+s =+$', result.stdout, re.MULTILINE)
        return result.returncode, closing, result.stdout

    return run


def test_passing(run):
    status, closing, _ = run()
    assert (status, closing) == (0, ['3 passed', '3 passed'])


@pytest.mark.parametrize('special, says', [
    ('MPI.COMM_WORLD.barrier(); raise KeyError("special")', 'failed on rank 1 of 2\n.*KeyError'),
    ('MPI.COMM_WORLD.barrier(); pytest.skip("only I")', 'skipped on rank 1 of 2\n.*only I'),
])
def test_one_rank_differs(run, special, says):
    status, closing, output = run(special)
    assert (status, closing) == (1, ['1 failed, 2 passed'])
    assert re.search(says, output, re.DOTALL)


def test_keep_going(run):
    special = 'MPI.COMM_WORLD.barrier(); raise KeyError("special")'
    status, closing, output = run(special, options=['--keep-going'])
    assert (status, closing) == (1, ['1 failed, 2 passed'] * 2)
    assert output.endswith('\nFailed at these numbers of ranks: 2, 3\n')


def test_one_rank_hangs(run):
    status, closing, output = run('time.sleep(100)')
    assert status != 0
    assert closing == ['1 error']
    stacks = re.split(r'_+ rank (\d) took too long in test_it.py::test_special _+\n', output)[1:]
    assert stacks[::2] == ['0', '1']
    lines = TESTS.format(special='time.sleep(100)', collecting='').splitlines()
    for stack, statement in zip(stacks[1::2], ['MPI.COMM_WORLD.barrier()', 'time.sleep(100)'],
                                strict=True):
        number = re.search(r'test_it.py", line (\d+) in test_special', stack)[1]
        assert lines[int(number) - 1].strip() == statement


def test_one_rank_dies(run):
    status, closing, output = run('os._exit(3)')
    assert status != 0
    assert closing == ['1 error']
    assert 'rank 1: test_it.py::test_special' in output


def test_one_rank_collects_otherwise(run):
    status, closing, output = run(collecting='raise KeyError("collecting")')
    assert (status, closing) == (2, ['no tests ran'])
    assert 'KeyError: ' in output
