"""chainermn.launch: results by rank, the error of the first failed rank, no leftover process."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from jobs import processes
from mpi4py import MPI
from time_limits import seconds, wait_until

import chainermn
from chainermn._commands.launch import serialization
from chainermn._process import launcher

# Some of the tests launch while MPI is initialized in this process, by shared_fixtures.py.
pytestmark = pytest.mark.mpi_skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Parent of launch's temporary folder; must be empty after the test."""
    path = tmp_path / 'launch'
    path.mkdir()
    monkeypatch.setenv('TMPDIR', str(path))
    monkeypatch.setattr('tempfile.tempdir', str(path))
    yield path
    assert list(path.iterdir()) == []
    assert left(path) == []


def left(folder):
    """Processes with a path inside the folder among their arguments."""
    return processes(lambda process: f'{folder}/'.encode() in (process / 'cmdline').read_bytes())


def write(tmp_path, code):
    script = tmp_path / 'script.py'
    script.write_text(textwrap.dedent(code))
    return script


def test_returns_results_by_rank(capsys, monkeypatch):
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    outside = np.arange(3.0)

    def compute(comm, scale, *, more):
        print(f'rank {comm.rank}')
        print('prints')
        print(f'rank {comm.rank} warns', file=sys.stderr)
        total = comm.allreduce(scale * outside)
        return comm.rank, comm.size, total, more, os.environ['OMP_NUM_THREADS'], os.environ['A']

    results = chainermn.launch(compute, 2, 2, more={'k': 1}, env={'A': 'b'})
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert [(rank, *rest) for rank, _, _, *rest in results] == [
        (rank, {'k': 1}, threads, 'b') for rank in range(2)]
    for _, size, total, *_ in results:
        assert size == 2
        np.testing.assert_array_equal(total, 4 * outside)
    captured = capsys.readouterr()
    assert sorted(captured.out.splitlines()) == ['prints'] * 2 + ['rank 0', 'rank 1']
    assert sorted(captured.err.splitlines()) == [f'rank {rank} warns' for rank in range(2)]


@pytest.mark.slow
def test_functions_defined_in_a_script(tmp_path):
    (tmp_path / 'elsewhere').mkdir()
    (tmp_path / 'beside.py').write_text('def give(comm):\n    return comm.rank\n')
    script = write(tmp_path, '''
        import beside
        import chainermn

        class Point:
            def __init__(self, x):
                self.x = x

        class Lost(Exception):
            pass

        def move(comm, point):
            return Point(point.x + comm.size + OFFSET)

        def lose(comm):
            raise Lost('way', 3)

        OFFSET = 10
        (moved,) = chainermn.launch(move, n=1, point=Point(5))
        assert type(moved) is Point and moved.x == 16
        assert chainermn.launch(beside.give, 2, communicator_name='naive') == [0, 1]
        try:
            chainermn.launch(lose, 1)
        except Lost as error:
            assert error.args == ('way', 3)
            print(error.__cause__)
        ''')
    done = subprocess.run([sys.executable, script], cwd=tmp_path / 'elsewhere', timeout=seconds(50),
                          text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, '')
    assert f'rank 0 of 1 (host {os.uname().nodename}, process ' in done.stdout
    assert "raise Lost('way', 3)" in done.stdout


def test_error_of_the_first_failed_rank_is_raised(capfd, folder, monkeypatch):
    monkeypatch.setattr('chainermn._commands.launch._SETTLE_TIME', 2)  # seconds, since it is busy

    def fail(comm):
        if comm.rank == 1:
            raise IndexError('no such luck')
        if comm.rank == 2:
            while not list(folder.glob('*/failed-1')):
                time.sleep(0.01)
            raise KeyError('late')
        comm.allreduce(np.ones(1))  # pending when the other ends

    with pytest.raises(IndexError) as caught:
        chainermn.launch(fail, 3)
    where = f'rank 1 of 3 (host {os.uname().nodename}, process '
    assert str(caught.value).startswith(f'no such luck [{where}')
    text = str(caught.value.__cause__)
    assert text.startswith(where)
    assert "raise IndexError('no such luck')" in text
    assert 'in _call' not in text  # the function's own frames
    assert "rank 2 also failed: KeyError: 'late'" in text
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ('', '')


ENDS = {
    'killed': (lambda: os.kill(os.getpid(), signal.SIGKILL), 'was killed by signal 9 (SIGKILL)'),
    'os._exit': (lambda: os._exit(0), 'exited with status 0'),
}


@pytest.mark.slow
@pytest.mark.parametrize('end, what', ENDS.values(), ids=ENDS.keys())
def test_killed_rank_is_named(end, what):
    def vanish(comm):
        if comm.rank == 1:
            end()
        comm.barrier()

    with pytest.raises(RuntimeError, match=r'^rank 1 of 2 \(host .*\) ') as caught:
        chainermn.launch(vanish, 2)
    assert str(caught.value).endswith(f'{what} without returning a result')


@pytest.mark.sample(1)
@pytest.mark.parametrize('ranks', [2, 1])
def test_killed_ranks_leave_no_shared_memory(tmp_path, ranks):
    """A later mpiexec with the same process ID would use the leftover segments."""
    def vanish(comm, path):
        from chainermn import global_except_hook

        path.write_text('\n'.join(global_except_hook.shared_memory()))
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError, match='SIGKILL'):
        chainermn.launch(vanish, ranks, tmp_path / 'segments')
    segments = (tmp_path / 'segments').read_text().split()
    assert segments
    assert not [path for path in segments if os.path.exists(path)]


@pytest.mark.slow
def test_failures_outside_the_function():
    class OddError(Exception):
        def __init__(self, one, two):  # unpickling gives one argument
            super().__init__('odd')

    def fail(comm, how):
        if how == 'thread':
            thread = threading.Thread(target=lambda: {}['no such key'])
            thread.start()
            thread.join()
        if how == 'odd':
            raise OddError(1, 2)
        if how == 'exit':
            sys.exit(3)
        return sys._getframe()

    for how, kind, text in [
        ('thread', KeyError, 'no such key'),
        ('odd', RuntimeError, r'OddError: odd \[rank 0 of 1 '),
        ('exit', RuntimeError, r'Exit: 3 \[rank 0 of 1 '),
        ('result', TypeError, r"the result of rank 0 \(<class 'frame'>\) cannot be pickled: "),
    ]:
        with pytest.raises(kind, match=text) as caught:
            chainermn.launch(fail, 1, how)
        assert 'rank 0 of 1 (host ' in str(caught.value.__cause__)


def test_timeout():
    def wait(comm):
        if comm.rank == 1:
            print('waits', flush=True)
            time.sleep(1000)

    # The time includes the start of the processes.
    with pytest.raises(TimeoutError, match=r'^ranks? (0-)?1 of 2 did not finish within 1 s'):
        chainermn.launch(wait, 2, timeout=1)


@pytest.mark.slow
def test_processes_that_a_rank_leaves_running_are_not_waited_for():
    def leave(comm):
        print('kept', flush=True)
        return subprocess.Popen(['sleep', '1000']).pid if comm.rank == 1 else 0

    started = time.monotonic()
    left = chainermn.launch(leave, 2, timeout=seconds(55))[1]
    os.kill(left, signal.SIGKILL)  # it was running until now
    assert time.monotonic() - started < seconds(55)


@pytest.mark.slow
def test_launch_from_a_rank(tmp_path):
    def outer(comm):
        assert launcher.is_connected() == ('PMI_FD' in os.environ)  # although it was forked
        os.environ['CHAINERMN_RUN_LINK'] = 'for this job'
        return chainermn.launch(
            lambda inner, x: (inner.size, x, os.environ.get('CHAINERMN_RUN_LINK')), 1, comm.rank)

    files = {'CHAINERMN_TIMELINE': str(tmp_path / 'a.json'),
             'CHAINERMN_RECORD': str(tmp_path / 'record')}
    assert chainermn.launch(outer, 2, env=files) == [[(1, 0, None)], [(1, 1, None)]]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize('is_open', [True, False])
def test_ranks_listen_on_loopback_only(is_open):
    def addresses(comm):
        """Addresses other than loopback where this process and its parent listen."""
        import glob
        import os
        import socket

        mine = socket.socket()
        if is_open:
            mine.bind(('0.0.0.0', 0))
            mine.listen()
        comm.allreduce_obj(1)
        sockets = set()
        for process in os.getpid(), os.getppid():
            for path in glob.glob(f'/proc/{process}/fd/*'):
                try:
                    sockets.add(os.readlink(path))
                except FileNotFoundError:  # it is closed by now
                    continue
        found = []
        for name in 'tcp', 'tcp6':
            with open(f'/proc/net/{name}') as file:
                for line in [*file][1:]:
                    _, address, _, state, *rest = line.split()
                    is_listening = state == '0A' and f'socket:[{rest[5]}]' in sockets
                    if is_listening and not address.startswith('0100007F:'):
                        found.append(address)
        return found

    for found in chainermn.launch(addresses, 2):
        assert len(found) == is_open, found


@pytest.mark.slow
def test_large_arguments_are_shared():
    def anonymous():
        with open('/proc/self/status') as file:
            return next(int(line.split()[1]) for line in file if line.startswith('RssAnon')) * 1024

    def look(comm, x):
        before = anonymous()
        total = float(x.sum())
        grown = anonymous() - before
        x[comm.rank] = -1  # its own copy
        comm.barrier()
        return total, grown, x[:2].tolist()

    x = np.ones(2 ** 23)  # 64 MiB
    results = chainermn.launch(look, 2, x)
    assert [total for total, _, _ in results] == [x.size, x.size]
    assert [start for _, _, start in results] == [[-1, 1], [1, -1]]
    assert max(grown for _, grown, _ in results) < x.nbytes / 2
    assert x[:2].tolist() == [1, 1]


INTERRUPTED = '''
    import time
    import chainermn

    def wait(comm):
        comm.barrier()
        if comm.rank == 0:
            print('all wait', flush=True)
        time.sleep(1000)

    try:
        chainermn.launch(wait, 2)
    except KeyboardInterrupt:
        print('interrupted')
        raise
    '''


@pytest.mark.slow
@pytest.mark.parametrize('sent', [signal.SIGINT, signal.SIGKILL])
@pytest.mark.usefixtures('default_signals')
def test_ranks_end_with_the_caller(tmp_path, folder, sent):
    script = write(tmp_path, INTERRUPTED)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True,
                          stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == 'all wait\n'
        assert len(left(folder)) >= 5  # mpiexec, and two for each rank
        process.send_signal(sent)
        out, err = process.communicate(timeout=seconds(30))
    assert process.returncode == -sent
    if sent == signal.SIGINT:
        assert out == 'interrupted\n'
        assert err.count('KeyboardInterrupt') == 1
        assert left(folder) == []
    wait_until(lambda: not left(folder) and not list(folder.iterdir()))


def test_wrong_arguments(monkeypatch, tmp_path):
    def run(comm, *args):
        raise AssertionError('was started')

    for fn, args, reason in [(lambda: 0, (), r'<lambda>\(\): too many'),
                             (lambda comm, x: 0, (), "missing a required argument: 'x'"),
                             (lambda comm: 0, (1,), 'too many positional arguments')]:
        with pytest.raises(TypeError, match=rf'calls fn\(comm, .* do not match .*{reason}'):
            chainermn.launch(fn, 2, *args)
    for wrong in (2.0, '2', True, None):
        with pytest.raises(TypeError, match='n must be an integer'):
            chainermn.launch(run, wrong)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match='n must be a positive integer'):
            chainermn.launch(run, wrong)
    with pytest.raises(TypeError, match=r'launch\(fn, n, \*args\): fn must be a function, not 3'):
        chainermn.launch(3, run)
    with pytest.raises(ValueError, match='timeout must be a positive number'):
        chainermn.launch(run, 2, timeout=0)
    with pytest.raises(TypeError, match="env must map strings to strings, but contains 'A': 1"):
        chainermn.launch(run, 2, env={'A': 1})
    with pytest.raises(TypeError, match=r'^run or one of its arguments cannot be pickled'):
        chainermn.launch(run, 2, sys._getframe())
    with pytest.raises(TypeError, match='Use the communicator that launch passes to the function'):
        chainermn.launch(run, 2, MPI.COMM_SELF.Dup())

    monkeypatch.setenv('PATH', str(tmp_path))
    monkeypatch.setattr(sys, 'executable', str(tmp_path / 'python'))
    with pytest.raises(FileNotFoundError, match='python -m pip install mpich'):
        chainermn.launch(run, 2)


def test_failing_mpiexec(monkeypatch, tmp_path):
    mpiexec = tmp_path / 'mpiexec'
    mpiexec.write_text('#!/bin/sh\necho no slots left >&2\nexit 7\n')
    mpiexec.chmod(0o755)
    monkeypatch.setattr(sys, 'executable', str(tmp_path / 'python'))
    with pytest.raises(RuntimeError, match='status 7 before ranks 0-1 of 2 had'
                                           r'(.|\n)*no slots left'):
        chainermn.launch(len, 2)


@pytest.mark.parametrize('x', [
    np.zeros((0, 3)), np.array(3), np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.arange(9)[::2], np.array([None, 'object'], object), np.arange(5, dtype='>i2'),
    [np.arange(n, dtype='i1') for n in range(70)], 'text', None,
], ids=repr)
def test_serialization_round_trip(tmp_path, x):
    path = str(tmp_path / 'object')
    serialization.save(path, x)
    got = serialization.load(path)
    os.remove(path)
    assert type(got) is type(x)
    for mine, theirs in zip(*([v] if isinstance(v, np.ndarray) else v or [] for v in (x, got)),
                            strict=True):
        np.testing.assert_array_equal(mine, theirs)
        if isinstance(mine, np.ndarray):
            assert theirs.dtype == mine.dtype and theirs.shape == mine.shape
            assert theirs.flags.writeable and theirs.flags.aligned
