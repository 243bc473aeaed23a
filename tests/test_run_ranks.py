"""A test run on several ranks ends whatever one rank does, and its last line gives the outcome."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest
import time_limits

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
def run_ranks(tmp_path):
    """Run a test file; return the exit status, pytest's last lines and the whole output."""
    def run_ranks(text, *options):
        shutil.copy(HERE / 'conftest.py', tmp_path)
        tmp_path.joinpath('test_it.py').write_text(text)
        config = [f'--rootdir={tmp_path}', '-c', str(HERE.parent / 'pyproject.toml')]
        command = [sys.executable, HERE / 'run_ranks.py', '--maxprocesses', '1', *options, *config,
                   tmp_path]
        env = {k: v for k, v in os.environ.items()
               if k != 'CHAINERMN_TEST_STACKS' and not k.startswith('PYTEST_')}
        result = subprocess.run(
            command, env=env, text=True, check=False, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT)
        closing = re.findall(r'^=+ (.*) in [\d.]+s.* =+$', result.stdout, re.MULTILINE)
        return result.returncode, closing, result.stdout

    return run_ranks


@pytest.fixture
def run(run_ranks):
    def run(special='pass', collecting='pass', ranks='2,3', options=()):
        return run_ranks(TESTS.format(special=special, collecting=collecting), '--ranks', ranks,
                         *options)

    return run


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize('special, says', [
    ('MPI.COMM_WORLD.barrier(); raise KeyError("special")', 'failed on rank 1 of 2\n.*KeyError'),
    ('MPI.COMM_WORLD.barrier(); pytest.skip("only I")', 'skipped on rank 1 of 2\n.*only I'),
])
def test_one_rank_differs(run, special, says):
    status, closing, output = run(special)
    assert (status, closing) == (1, ['1 failed, 2 passed'])
    assert re.search(says, output, re.DOTALL)


@pytest.mark.slow
def test_one_rank_hangs(run):
    status, closing, output = run('time.sleep(1000)')
    assert status != 0
    assert closing == ['1 error']
    stacks = re.split(r'_+ rank (\d) took too long in test_it.py::test_special _+\n', output)[1:]
    assert stacks[::2] == ['0', '1']
    lines = TESTS.format(special='time.sleep(1000)', collecting='').splitlines()
    for stack, statement in zip(stacks[1::2], ['MPI.COMM_WORLD.barrier()', 'time.sleep(1000)'],
                                strict=True):
        number = re.search(r'test_it.py", line (\d+) in test_special', stack)[1]
        assert lines[int(number) - 1].strip() == statement


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize('ranks', [1, 2])
def test_one_rank_dies(run, ranks):
    status, closing, output = run('os._exit(3)', ranks=str(ranks))
    assert status != 0
    assert closing == [['1 failed, 2 passed'], ['1 error']][ranks - 1]
    assert ['crashed while running', 'rank 1: test_it.py::test_special'][ranks - 1] in output


@pytest.mark.full
def test_one_rank_collects_otherwise(run):
    status, closing, output = run(collecting='raise KeyError("collecting")')
    assert (status, closing) == (2, ['no tests ran'])
    assert 'KeyError: ' in output


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setenv('CHAINERMN_TEST_SLOWNESS', '0.9')
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: {0, 1})
    monkeypatch.setattr(os, 'getloadavg', lambda: (1.5, 9, 9))


def test_limits_grow_with_the_load(quiet, monkeypatch):
    monkeypatch.setattr(os, 'getloadavg', lambda: (8, 0, 0))
    assert time_limits.seconds(20) == 80


def test_default_signals(request):
    """Signals are ignored under nohup and in the background of a shell script."""
    ignored = [signal.SIGHUP, signal.SIGINT]
    before = [signal.signal(number, signal.SIG_IGN) for number in ignored]
    try:
        request.getfixturevalue('default_signals')
        for number in ignored:
            assert subprocess.run(['sh', '-c', f'kill -{int(number)} $$']).returncode == -number
    finally:
        for number, handler in zip(ignored, before, strict=True):
            signal.signal(number, handler)
