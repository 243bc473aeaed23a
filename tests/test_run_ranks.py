"""A test run on several ranks ends, whatever one rank does, and its last line says how."""

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
MARKED = """
import pytest
from mpi4py import MPI

@pytest.fixture(autouse=True)
def say(request):
    with open({file!r}, 'a') as file:
        file.write(f'{{MPI.COMM_WORLD.size}} {{request.node.name[5:]}}\\n')

def test_plain():
    pass

@pytest.mark.every_size
def test_every_size():
    pass

@pytest.mark.every_size
@pytest.mark.mpi(min_size=4)
def test_min_size():
    pass

@pytest.mark.mpi_skip
def test_one_process():
    pass

@pytest.mark.full
def test_full():
    pass
"""


@pytest.fixture
def run_ranks(tmp_path):
    """Run a test file; give the status, the closing lines of pytest, and what was printed."""
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


@pytest.mark.full
def test_passing(run):
    status, closing, _ = run(ranks='1,3')
    assert (status, closing) == (0, ['3 passed', '3 passed'])


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


@pytest.mark.full
def test_stop_after(run):
    status, closing, _ = run(ranks='1,2', options=['--stop-after', '0'])
    assert (status, closing) == (0, ['3 skipped', '3 skipped'])


@pytest.mark.full
def test_keep_going(run):
    special = 'MPI.COMM_WORLD.barrier(); raise KeyError("special")'
    status, closing, output = run(special, options=['--keep-going'])
    assert (status, closing) == (1, ['1 failed, 2 passed'] * 2)
    assert output.endswith('\nFailed at these numbers of ranks: 2, 3\n')


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


@pytest.mark.full
def test_one_process_hangs(run):
    """The other tests are run by another one."""
    status, closing, output = run('time.sleep(1000)', ranks='1')
    assert (status, closing) == (1, ['1 failed, 2 passed'])
    report, _, last = output.rstrip().rpartition('\n')
    assert '1 failed' in last
    number = re.search(r'crashed while running .*test_it.py::test_special(?:.*\n)*?'
                       r'.*test_it.py", line (\d+) in test_special\n', report)[1]
    lines = TESTS.format(special='time.sleep(1000)', collecting='').splitlines()
    assert lines[int(number) - 1].strip() == 'time.sleep(1000)'
    assert '_pytest' not in report


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


@pytest.mark.full
@pytest.mark.parametrize('options, expected', [
    ([], {1: 'plain every_size one_process', 2: 'every_size', 3: 'plain every_size'}),
    (['-m', 'every_size', '--ranks', '4'], {4: 'every_size min_size'}),
    (['--ranks', '1,2', '--full'], {1: 'plain every_size one_process full',
                                    2: 'plain every_size full'}),
], ids=['by default', 'four', 'all at these numbers'])
def test_which_tests_run_at_which_number_of_ranks(run_ranks, tmp_path, options, expected):
    file = tmp_path / 'ran'
    status, _, output = run_ranks(MARKED.format(file=str(file)), *options)
    assert status == 0, output
    assert sorted(file.read_text().splitlines()) == sorted(
        f'{size} {name}' for size, names in expected.items() for name in names.split()
        for _ in range(size))


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setenv('CHAINERMN_TEST_SLOWNESS', '0.9')
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: {0, 1})
    monkeypatch.setattr(os, 'getloadavg', lambda: (1.5, 9, 9))


def test_limits_are_those_of_a_quiet_machine(quiet):
    assert time_limits.seconds(20) == 20


def test_limits_grow_with_how_slow_the_machine_was_at_the_start(quiet, monkeypatch):
    monkeypatch.setenv('CHAINERMN_TEST_SLOWNESS', '2.5')
    assert time_limits.seconds(20) == 50


def test_limits_grow_with_the_load(quiet, monkeypatch):
    monkeypatch.setattr(os, 'getloadavg', lambda: (8, 0, 0))
    assert time_limits.seconds(20) == 80


def test_a_run_measures_once(monkeypatch):
    code = 'import os, time_limits; print(os.environ[time_limits.VARIABLE])'
    env = {**os.environ, 'PYTHONPATH': str(HERE)}
    first = subprocess.check_output([sys.executable, '-c', code], text=True, env={
        k: v for k, v in env.items() if k != time_limits.VARIABLE})
    assert float(first) > 0
    assert subprocess.check_output([sys.executable, '-c', code], text=True, env=env | {
        time_limits.VARIABLE: '7.25'}) == '7.25\n'


def test_default_signals(request):
    """As under nohup, and in the background of a shell script."""
    ignored = [signal.SIGHUP, signal.SIGINT]
    before = [signal.signal(number, signal.SIG_IGN) for number in ignored]
    try:
        request.getfixturevalue('default_signals')
        for number in ignored:
            assert subprocess.run(['sh', '-c', f'kill -{int(number)} $$']).returncode == -number
    finally:
        for number, handler in zip(ignored, before, strict=True):
            signal.signal(number, handler)
