"""Ranks that wait in MPI_Init for a rank that does not start MPI."""

import os
import signal
import subprocess
import sys
import time

import pytest
from jobs import run_job
from time_limits import seconds

pytestmark = pytest.mark.mpi_skip

SCRIPT = '''
import os, pathlib, signal, sys, time
import chainermn

pathlib.Path('process' + os.environ['PMI_RANK']).write_text(str(os.getpid()))
if os.environ['PMI_RANK'] == {rank!r}:
    {action}
comm = chainermn.create_communicator('naive')
comm.barrier()
print('went on\\n', end='', flush=True)
'''
WARNING = ('chainermn: warning: rank {} has waited for 1 s in create_communicator, called at '
           'script.py:8; does every rank call create_communicator? The job continues '
           '(CHAINERMN_STALL_WARNING sets the seconds, 0 disables this warning)\n')
ABORT = ('aborts the job: waited for 3 s in create_communicator, called at script.py:8; does every '
         'rank call create_communicator? the timeout is 3 s')


def run(folder, action, rank='1', ranks=2, limit=40, **env):
    return run_job(folder, SCRIPT.format(rank=rank, action=action), ranks=ranks, limit=limit, **env)


@pytest.mark.parametrize('rank, waiting', [
    ('1', 0), pytest.param('0', 1, marks=pytest.mark.slow)])
def test_a_rank_that_ends_without_starting_mpi(tmp_path, rank, waiting):
    done = run(tmp_path, 'sys.exit()', rank, CHAINERMN_STALL_WARNING='1', CHAINERMN_TIMEOUT='3')
    assert done.returncode != 0
    assert done.stdout.count('chainermn: ') == 2, done.stdout
    assert WARNING.format(waiting) in done.stdout
    assert f'chainermn: rank {waiting} of 2 (host ' in done.stdout and ABORT in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize('limit, is_warned', [('1', True), ('0', False), ('', False)])
def test_a_late_rank(tmp_path, limit, is_warned):
    done = run(tmp_path, 'time.sleep(5)', ranks=3, CHAINERMN_STALL_WARNING=limit)
    assert (done.returncode, done.stdout.count('went on')) == (0, 3), done.stdout
    assert done.stdout.count('chainermn: ') == is_warned, done.stdout
    assert (WARNING.format(0) in done.stdout) == is_warned


@pytest.mark.slow
def test_a_job_that_was_suspended(tmp_path):
    """The time does not count toward the timeout."""
    (tmp_path / 'script.py').write_text(SCRIPT.format(rank='1', action='time.sleep(14)'))
    with subprocess.Popen(
            ['mpiexec', '-n', '2', sys.executable, 'script.py'], cwd=tmp_path, text=True,
            env={**os.environ, 'CHAINERMN_STALL_WARNING': '0', 'CHAINERMN_TIMEOUT': '10'},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        time.sleep(3)
        groups = [int((tmp_path / f'process{rank}').read_text()) for rank in range(2)]
        for number, pause in (signal.SIGSTOP, 12), (signal.SIGCONT, 0):
            for group in groups:
                os.killpg(group, number)
            time.sleep(pause)
        output, _ = process.communicate(timeout=seconds(30))
    assert (process.returncode, output) == (0, 'went on\n' * 2)


@pytest.mark.parametrize('action, env', [
    ('pass', {}), ("os.environ['PATH'] = ''", {}),
    ('pass', {'CHAINERMN_STALL_WARNING': '0', 'CHAINERMN_TIMEOUT': '0'})],
    ids=['defaults', 'no shell', 'disabled'])
def test_a_correct_job_prints_nothing(tmp_path, action, env):
    done = run(tmp_path, action, '0', **env)
    assert (done.returncode, done.stdout) == (0, 'went on\n' * 2)


@pytest.mark.slow
def test_the_shell_ends_with_its_rank(tmp_path):
    """Otherwise, the job would last until the stall warning."""
    done = run(tmp_path, 'time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)', limit=20)
    assert done.returncode != 0
    assert 'chainermn' not in done.stdout
