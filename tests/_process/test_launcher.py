"""Ranks abort the job before MPI_Init with their status; their child processes never do."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest
from mpi4py import MPI
from time_limits import seconds

from chainermn._process import launcher

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason='starts processes of its own')

CHILDREN = str(pathlib.Path(__file__).parents[1] / 'reliability' / 'child_processes.py')


def children(folder, command, *arguments, **env):
    """Return how child processes end, on each rank."""
    folder.mkdir()
    done = subprocess.run([*command, sys.executable, '-W', 'ignore', CHILDREN, folder, *arguments],
                          env={**os.environ, **env}, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, check=False)
    errors = [path.read_text() for path in folder.glob('errors-*')]
    assert (done.returncode, done.stdout) == (0, ''), (done, errors)
    return [json.loads(path.read_text()) for path in folder.glob('outcomes-*')]


@pytest.mark.slow
@pytest.mark.limit(150)
def test_child_processes_end_as_without_chainermn(tmp_path):
    outcomes = children(tmp_path / 'ranks', ['mpiexec', '-n', '2'])
    expected = {
        'before forkserver process return': ['0', []],
        'before forkserver process raise': ['1', ['ValueError: of a child']],
        'before spawn process exit': ['3', []],
        'before  program exit': ['3', []],
        'before  shell exit': ['3', []],
        'after forkserver pool exit': ['3', []],
        'after forkserver executor killed': [
            'BrokenProcessPool: A process in the process pool was terminated abruptly while the '
            'future was running or pending.', []],
        'after fork process killed': ['-9', []],
        'after forkserver iterator return': ['[1, 2]', []],
    }
    assert outcomes == [expected] * 2


@pytest.mark.full
@pytest.mark.limit(900)
def test_all_child_processes_end_as_without_chainermn(tmp_path):
    expected, = children(tmp_path / 'without', [], 'all', WITHOUT_CHAINERMN='1')
    assert len(expected) == 94
    assert children(tmp_path / 'ranks', ['mpiexec', '-n', '2'], 'all') == [expected] * 2


def test_other_files_are_not_mistaken_for_the_connection_to_mpiexec(monkeypatch):
    with contextlib.ExitStack() as stack:
        sockets = [*socket.socketpair(), socket.socket()]
        for each in sockets:
            stack.enter_context(each)
        with open(os.devnull) as file:
            for number in (*(each.fileno() for each in sockets), file.fileno(), 2 ** 20, '', 'no'):
                monkeypatch.setenv('PMI_FD', str(number))
                assert not launcher.is_connected()
                assert launcher.process() == 0


EARLY = '''
import argparse, os, sys
import chainermn
parser = argparse.ArgumentParser()
parser.add_argument('--ranks', type=int, nargs='*')
parser.add_argument('--how')
options = parser.parse_args()
if options.ranks == [] or int(os.environ.get(
        'PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK', 0))) in options.ranks:
    if options.how == 'import':
        import a_missing_module
    sys.exit('no such file' if options.how == 'text' else 4)
chainermn.create_communicator('naive')
'''
#: The arguments; the status of mpiexec; at most that many lines of output; one of its lines.
FAILURES = {
    'wrong option': (['--wrong'], 2, 6, 'aborts the job: sys.exit with status 2'),
    'import error on all ranks': (['--how', 'import', '--ranks'], 1, 6, 'ModuleNotFoundError: '),
    'import error on rank 1': (['--how', 'import', '--ranks', '1'], 1, 6, 'rank 1 of 2'),
    'text on all ranks': (['--how', 'text', '--ranks'], 1, 3, 'sys.exit with status 1'),
    'status of rank 0': (['--how', 'status', '--ranks', '0'], 4, 1, 'rank 0 of 2'),
}


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.skipif('MPICH' not in MPI.Get_library_version(),
                    reason="Open MPI's mpiexec reports failures before MPI_Init itself")
def test_a_failure_before_mpi_init_is_reported_once(tmp_path):
    (tmp_path / 'script.py').write_text(EARLY)

    def start(arguments):
        return subprocess.Popen(
            ['mpiexec', '-n', '2', sys.executable, 'script.py', *arguments], cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    jobs = {name: start(arguments) for name, (arguments, *_) in FAILURES.items()}
    with_help = start(['--help'])
    for name, (_, status, n_lines, text) in FAILURES.items():
        output, _ = jobs[name].communicate(timeout=seconds(60))
        assert jobs[name].returncode == status, (name, output)
        assert output.count(text) == output.count('chainermn: rank ') == 1, (name, output)
        assert len(output.splitlines()) <= n_lines, (name, output)
    output, _ = with_help.communicate(timeout=seconds(60))
    assert (with_help.returncode, output.count('usage: '), 'chainermn' in output) == (0, 2, False)


def test_a_name_is_claimed_by_one_rank_of_a_job(tmp_path):
    (tmp_path / 'script.py').write_text('''
import os, socket
socket.setdefaulttimeout(10)  # MPI still uses a connection without a timeout
from chainermn._process import launcher
from mpi4py import MPI
claims = [launcher.claim(name) for name in ('report', 'report', 'other')]
assert MPI.COMM_WORLD.allreduce(sum(claims)) == 3
rank = MPI.COMM_WORLD.rank
assert launcher.claim(f'own {rank}')
MPI.COMM_WORLD.Barrier()
assert not launcher.claim(f'own {1 - rank}')
assert os.environ.get('PMI_FD') is None or os.get_blocking(int(os.environ['PMI_FD']))
''')
    subprocess.run(['mpiexec', '-n', '2', sys.executable, '-W', 'error', 'script.py'],
                   cwd=tmp_path, check=True, timeout=seconds(50))


CLAIM = '''
import os
from chainermn._process import launcher
found = [launcher.claim(name) for name in ('report', 'error 0', 'new \\udcff', 'other')]
if os.getuid() == 0:
    os.setuid(65534)
    os.getuid = lambda: 0
    found.append(launcher.claim('of another user'))
print(*found, flush=True)
input()
'''


def test_some_names_are_claimed_by_processes_of_the_same_user(monkeypatch):
    monkeypatch.setenv('PMIX_NAMESPACE', f'prterun-{"long" * 16}-{os.getpid()}@1')
    files = os.listdir('/proc/self/fd')
    assert all(launcher.claim(f'error {i}') for i in range(100))
    assert launcher.claim('new \udcff') and launcher.claim('report')
    assert len(os.listdir('/proc/self/fd')) == len(files) + launcher._MAX_CLAIMS
    with subprocess.Popen([sys.executable, '-W', 'error', '-c', CLAIM], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline().split()[:4] == ['False', 'True', 'False', 'True']
        assert not launcher.claim('other')
        assert launcher.claim('of another user')
        child.communicate('\n', timeout=seconds(20))
