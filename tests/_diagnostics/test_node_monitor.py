"""The node monitor reports a killed rank."""

import os
import re
import select
import signal
import socket
import subprocess
import sys

import pytest
from jobs import run_job
from mpi4py import MPI
from time_limits import seconds, wait_until

from chainermn._diagnostics.node_monitor import monitor_process, rank_client

START = '''
import ctypes, os, signal, sys, threading, time
import chainermn
comm = chainermn.create_communicator('naive')
comm.barrier()
'''
DYING = {
    'SIGTERM': ('os.kill(os.getpid(), 15)', 'killed by SIGTERM (Terminated)', 'script.py", line 6'),
    'SIGTERM inside an operation': (
        'threading.Timer(.5, lambda: os.kill(os.getpid(), 15)).start(); comm.recv(0, 5)',
        'killed by SIGTERM', 'point_to_point.py"'),
    'SIGSEGV': ('ctypes.string_at(0)', 'killed by SIGSEGV (Segmentation fault)',
                'script.py", line 6 in <module>'),
    'SIGABRT': ('os.abort()', 'killed by SIGABRT (Aborted)', 'script.py", line 6 in <module>'),
    'SIGUSR2': ('os.kill(os.getpid(), 12)', 'killed by SIGUSR2', ''),
    'exit in C': ('ctypes.CDLL(None)._exit(5)',
                  'exited with status 5 before the end of its script', ''),
    'raise SystemExit': ('raise SystemExit(4)', '', ''),  # the others report it
}

starts = pytest.mark.mpi_skip


def run(tmp_path, body, ranks=2, **env):
    return run_job(tmp_path, START + body, ranks=ranks, **env)


def check_report(done, why):
    assert done.returncode != 0
    said = re.findall(r'^chainermn: (rank .*)$', done.stdout, re.MULTILINE)
    if why:
        assert len(said) == 1 and re.match(
            rf'rank 1 of [23] \(host {os.uname().nodename}, process [0-9]+\) failed: '
            + re.escape(why), said[0]), done.stdout


@pytest.mark.slow
@pytest.mark.sample(1)
@starts
@pytest.mark.parametrize('body, why, stack', DYING.values(), ids=DYING.keys())
def test_a_rank_that_is_killed(tmp_path, body, why, stack):
    done = run(tmp_path, f'if comm.rank == 1: {body}\ncomm.barrier()\nprint("went on")')
    check_report(done, why)
    assert 'went on' not in done.stdout
    assert stack in done.stdout and 'Extension modules' not in done.stdout


@pytest.mark.slow
@starts
def test_can_be_switched_off(tmp_path):
    done = run(tmp_path, 'if comm.rank == 1: os.kill(os.getpid(), 9)\ncomm.barrier()',
               CHAINERMN_FORCE_ABORT_ON_EXCEPTIONS='0')
    assert done.returncode != 0 and 'chainermn' not in done.stdout


OF_THIS_JOB = """
import glob
for path in glob.glob('/proc/[0-9]*/environ') if comm.rank == 1 else []:
    try:
        with (open(path, errors='replace') as environment,
              open(f'{path[:-7]}cmdline', errors='replace') as command):
            if ('MARK=' + os.environ['MARK'] in environment.read()
                    and 'monitor_process.py' in command.read()):
                with open(os.environ['MARK'], 'a') as file:
                    print(path, file=file)
    except OSError:
        pass
if comm.rank == 1: os.kill(os.getpid(), 9)
comm.barrier()
"""


@starts
def test_it_reports_a_killed_rank_and_exits_with_the_ranks(tmp_path):
    done = run(tmp_path, OF_THIS_JOB, MARK=str(tmp_path / 'processes'))
    check_report(done, 'killed by SIGKILL (Killed')
    path, = (tmp_path / 'processes').read_text().splitlines()
    wait_until(lambda: not os.path.exists(path))


ORPHANS = """
import pathlib
from chainermn._process import launcher
process = launcher.process()
assert process
pathlib.Path(sys.argv[1], f'rank{comm.rank}').write_text(str(os.getpid()))
comm.barrier()
if comm.rank == 1: os.kill(process, 9)
time.sleep(60)
"""


@pytest.mark.slow
@starts
@pytest.mark.usefixtures('needs_launcher')
def test_ranks_end_if_their_launcher_is_killed(tmp_path):
    """Otherwise, they would continue to train, and remove their checkpoints at the end."""
    (tmp_path / 'reports').mkdir()
    done = run_job(tmp_path, START + ORPHANS, '.', CHAINERMN_RUN_FOLDER=str(tmp_path / 'reports'))
    assert done.returncode != 0
    for path in tmp_path.glob('rank*'):
        wait_until(lambda path=path: not os.path.exists(f'/proc/{path.read_text()}'))
    report, = (tmp_path / 'reports').iterdir()
    assert 'exited before its ranks' in report.read_text()


@pytest.fixture
def needs_launcher():
    """Skip the test with Open MPI, which ends its ranks itself."""
    if 'MPICH' not in MPI.Get_library_version():
        pytest.skip('needs MPICH')


def monitored(status, alone=True, received=(), is_busy=False, first=0, is_slow=False,
              has_launcher=False):
    """Monitor two processes; return their signals and the report.

    The first one may be slow to exit after its files are closed. Their launcher is killed last.
    """
    ranks = [subprocess.Popen(['sleep', '60']) for _ in range(2 + has_launcher)]
    files = [os.pidfd_open(rank.pid) for rank in ranks]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f'\0chainermn-test-{os.getpid()}')
        listener.listen()
        monitor = subprocess.Popen(
            [sys.executable, '-I', '-S', monitor_process.__file__, str(listener.fileno()),
             '2', str(int(alone)),
             *(f'{n}:{rank.pid}:{files[n]}' for n, rank in enumerate(ranks[:2])),
             *map(str, files[2:])],
            pass_fds=[listener.fileno(), *files], stderr=subprocess.PIPE, text=True)
        connections = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for n, connection in enumerate(connections):
            connection.connect(listener.getsockname())
            assert connection.recv(1) == monitor_process.READY
            connection.send(b'%d\n' % n + (received[n] if received else b''))
    if is_busy:
        monitor.send_signal(signal.SIGSTOP)
    ended = [n for n in (first, 1 - first) if status[n]]
    for n in ended:
        connections[n].close()  # the kernel does so before the process is gone
    for n in reversed(ended) if is_slow else ended:
        ranks[n].send_signal(status[n])
        select.select([files[n]], [], [])  # until it has ended
    if is_busy:
        monitor.send_signal(signal.SIGCONT)
    if has_launcher:
        ranks[2].kill()
        ranks.pop().wait()
    _, said = monitor.communicate(timeout=seconds(30))
    for file in files:
        os.close(file)
    for connection in connections:
        connection.close()
    return [-rank.wait() for rank in ranks], said


@starts
def test_it_kills_ranks_that_mpiexec_leaves():
    status, said = monitored([0, 9], received=[b'', b'a stack\n'])
    assert status == [9, 9]
    assert re.match(r'chainermn: rank 1 of 2 .* killed by SIGKILL .*\na stack\n$', said), said


@starts
def test_ranks_without_a_launcher_are_killed():
    status, said = monitored([0, 0], has_launcher=True)
    assert status == [9, 9]
    assert re.fullmatch(r'chainermn: the mpiexec process on host .* exited before .*\n', said)


@starts
def test_a_launcher_that_ends_after_its_ranks_is_not_reported():
    status, said = monitored([10, 10], has_launcher=True)
    assert status == [10, 10]
    assert said.startswith('chainermn: rank 0 of 2 ') and 'mpiexec' not in said


@starts
def test_a_rank_that_reports_itself_is_not_reported():
    assert monitored([10, 10], received=[b'a stack\n', monitor_process.REQUEST]) == ([10, 10], '')


@pytest.mark.sample(3)
@starts
@pytest.mark.parametrize('first', [0, 1])
@pytest.mark.parametrize('is_busy, is_slow', [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize('numbers', [(9, 9), (15, 9), (9, 15)])
def test_the_first_failure(first, numbers, is_busy, is_slow):
    status, said = monitored(numbers, is_busy=is_busy, first=first, is_slow=is_slow)
    assert status == [*numbers]
    assert said.startswith(f'chainermn: rank {first} of 2 (host '), said


@starts
@pytest.mark.parametrize('alone, number, said', [
    (True, 9, 'rank 0 of 2 '), (False, 9, 'ended first on its host: killed by SIGKILL'),
    (False, 10, 'rank 0 of 2 ')])
def test_all_ranks_of_a_host_are_killed_at_once(alone, number, said):
    """On several hosts mpiexec does that after an error elsewhere."""
    status, text = monitored([number, number], alone)
    assert status == [number] * 2
    assert said in text
    assert text.count('chainermn: ') == 1


def test_one_monitor_for_all_communicators(comm):
    first = rank_client._file()
    assert (first >= 0) == (comm.size > 1)
    comm.split(0, comm.rank).finalize()
    assert rank_client._file() == first
