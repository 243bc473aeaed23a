"""``chainermn top`` shows the ranks of running jobs, and reports an error if it cannot."""

import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
from jobs import WRITE_PROCESS, RunningJob
from time_limits import seconds, wait_until

from chainermn._commands import top as top_command
from chainermn._commands.top import jobs, table
from chainermn._timeline.activities import NAMES

pytestmark = pytest.mark.mpi_skip

#: Updates whose parts take known times, until the file "end" exists: 0.1 s, half of it waiting on
#: all ranks but rank 1. If the file "stop" exists, the program does what it says.
TRAIN = '''
import os, pathlib, signal, time
import chainer, numpy as np
import chainermn

comm = chainermn.create_communicator('naive')
model = chainer.links.Linear(3, 2)
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)

class Slow:
    def __len__(self):
        return 10
    def __getitem__(self, i):
        time.sleep(.02)
        return np.ones(3, 'f')

def loss(x):
    time.sleep(.03 if comm.rank != 1 else .08)
    return chainer.functions.sum(model(x))

iterator = chainer.iterators.SerialIterator(Slow(), 1)
''' + WRITE_PROCESS + '''
while not comm.allreduce_obj(os.path.exists('end'), op='max'):
    optimizer.update(loss, np.stack(iterator.next()))
    if os.path.exists('deadlock'):
        comm.recv_obj((comm.rank + 1) % comm.size)
'''

FORK = '''
import os, pathlib, signal, time
import chainermn

signal.signal(signal.SIGPIPE, signal.SIG_DFL)
comm = chainermn.create_communicator('naive')
''' + WRITE_PROCESS + '''
while not comm.allreduce_obj(os.path.exists('end'), op='max'):
    time.sleep(.05)
    if comm.rank == 0 and os.path.exists('fork'):
        os.remove('fork')
        if not os.fork():
            pathlib.Path('new').write_text(str(os.getpid()))
            pathlib.Path('new').rename('child')
            time.sleep(600)
            os._exit(0)
'''


PAGE = (pathlib.Path(__file__).parents[2] / 'docs/monitoring.md').read_text()
#: The fields of each rank that the page lists.
FIELDS = re.findall('`(\\w+)`', PAGE.partition('for each of the `ranks`:')[2].partition(
    'Unknown values')[0])


def start(folder, ranks, program=TRAIN, name='train_known.py', **options):
    return RunningJob(folder, program, ranks, name, **options)


def top(*args, check=True):
    done = subprocess.run([sys.executable, '-m', 'chainermn', 'top', *map(str, args)], text=True,
                          capture_output=True, check=False, timeout=seconds(60))
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize('n', [pytest.param(1, marks=pytest.mark.slow), 2,
                               pytest.param(4, marks=pytest.mark.slow)])
def test_numbers_of_each_rank(tmp_path, n):
    shown = {}

    def has_updates():
        nonlocal shown
        shown = json.loads(top(job.ranks[-1], '--json', '-n', 4).stdout.splitlines()[-1])
        return all(row['updates'] > 1 for row in shown['ranks'])

    with start(tmp_path, n) as job:
        wait_until(has_updates, 20)  # on a busy machine, none may fit between two tables
    assert (job.process.returncode, shown['job']) == (0, 'train_known.py')
    assert [row['rank'] for row in shown['ranks']] == [*range(n)]
    assert [row['pid'] for row in shown['ranks']] == job.ranks
    for row in shown['ranks']:
        assert 0 < row['updates_per_second'] < 1 / .05
        assert set(row['shares']) == set(NAMES)
        assert sum(row['shares'].values()) == pytest.approx(1)
        assert row['rss_bytes'] > 2**20 and row['gpu_bytes'] == 0
        assert row['gpu_utilization'] is row['gpu_used_bytes'] is row['gpu_total_bytes'] is None
        assert 0 < row['cpu_cores'] < 2 and row['log'] == {}
        assert [*row] == FIELDS
        assert row['is_straggler'] == (n > 1 and row['rank'] == 1)
        assert not row['is_silent']
        # At least 0.02 s for data, and 0.03 or 0.08 s for the loss; more on a busy machine.
        step = 1 / row['updates_per_second']
        assert .7 < row['shares']['data'] * step / .02 < seconds(2)
        forward = .08 if row['rank'] == 1 else .03
        assert .7 < row['shares']['forward'] * step / forward < seconds(2)
    waiting = [row['shares']['waiting'] for row in shown['ranks']]
    assert n == 1 or max(waiting[1:2]) < min(waiting[:1] + waiting[2:])


@pytest.mark.slow
def test_a_table_by_the_name_of_the_job_and_its_mpiexec(tmp_path):
    def with_straggler(target):
        lines = top(target).stdout.splitlines()
        return lines if ' straggler' in ''.join(lines[2:]) else None

    with start(tmp_path, 3, name='train_table.py') as job:
        for target in (job.process.pid, job.ranks[2], 'train_table.py'):
            # On a busy machine, all ranks may be equally slow for a moment.
            head, columns, *rows = wait_until(functools.partial(with_straggler, target))
            assert re.fullmatch(r'train_table\.py: 3 ranks on 1 host, [\d.]+ updates per second',
                                head)
            assert columns.split() == ['rank', 'host', 'updates', 'per', 's', *NAMES, 'CPU', 'RSS',
                                       'GPU', 'VRAM', 'state']
            assert [row.split()[0] for row in rows] == ['0', '1', '2']
            assert [' straggler' in row for row in rows] == [False, True, False]


@pytest.mark.full
@pytest.mark.limit(200)
def test_64_ranks(tmp_path):
    """The first table already has all of them."""
    program = TRAIN.replace('.03 if comm.rank != 1 else .08', '1 if comm.rank != 40 else 2')
    with start(tmp_path, 64, program) as job:
        for line in top(job.ranks[0], '--json', '-n', 3).stdout.splitlines():
            rows = json.loads(line)['ranks']
            assert [row['rank'] for row in rows] == [*range(64)]
            assert not any(row['is_silent'] or row['shares'] is None for row in rows)
            assert [row['rank'] for row in rows if row['is_straggler']] == [40]


@pytest.mark.slow
def test_a_deadlock_and_a_stopped_rank(tmp_path):
    with start(tmp_path, 2, CHAINERMN_DEADLOCKS='0', CHAINERMN_TIMEOUT='0') as job:
        os.kill(job.ranks[1], signal.SIGSTOP)
        text = top(job.process.pid, '-n', 4).stdout
        assert re.search(r'^ +1 .*does not respond$', text, re.MULTILINE), text
        assert '1 rank not responding' in text
        shown = json.loads(top(job.ranks[0], '--json', '-n', 6).stdout.splitlines()[-1])
        assert [row['is_silent'] for row in shown['ranks']] == [False, True]
        assert re.search(r'^ +0 .* in \w+ #\d+.*, called at train_known.py:\d+ \(for \d+ s\)$',
                         text, re.MULTILINE), text
        os.kill(job.ranks[1], signal.SIGCONT)
        (tmp_path / 'deadlock').touch()  # it lasts until the job is killed
        wait_until(lambda: 'all ranks are waiting: a deadlock?' in top(
            job.process.pid, '-n', 2).stdout, 30)
        text = top(job.process.pid).stdout  # measured only since the deadlock
        assert 'straggler' not in text
        assert re.search(r'^ +0 .* 100% +0% +0%  ', text, re.MULTILINE), text  # waiting
        assert re.search(r'in recv_obj #\d+ from rank 1 .*, called at train_known.py:\d+ \(for ',
                         text), text
        job.process.kill()


@pytest.mark.slow
def test_it_sees_how_a_job_ends(tmp_path):
    for how in ('finished', 'killed'):
        folder = tmp_path / how
        folder.mkdir()
        with start(folder, 2) as job, subprocess.Popen(
                [sys.executable, '-m', 'chainermn', 'top', str(job.process.pid), '-n', '1000'],
                text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watching:
            watching.stdout.readline()  # the first table
            if how == 'killed':
                for rank in job.ranks:
                    os.kill(rank, signal.SIGKILL)
            else:
                (folder / 'end').touch()
            _, error = watching.communicate(timeout=seconds(60))
        assert (watching.returncode, 'failed or was killed' in error) == (
            (0, False) if how == 'finished' else (1, True)), error


@pytest.mark.slow
def test_ranks_started_by_shells_are_one_job(tmp_path):
    (tmp_path / 'wrapper.sh').write_text('"$@"\nexit $?\n')
    with start(tmp_path, 2, wrapper=('sh', 'wrapper.sh')) as job:
        for target in (job.process.pid, job.ranks[0]):
            assert top(target).stdout.startswith('train_known.py: 2 ranks on 1 host, ')
    assert job.process.returncode == 0


@pytest.mark.slow
def test_a_viewer_that_does_not_read(tmp_path):
    """Ranks and other viewers are not affected, and the viewer can continue later."""
    with start(tmp_path, 2) as job, subprocess.Popen(
            [sys.executable, '-m', 'chainermn', 'top', str(job.ranks[0]), '-n', '1000'],
            stdout=subprocess.PIPE) as watching:
        watching.stdout.readline()
        watching.send_signal(signal.SIGSTOP)
        before = top(job.ranks[0], '--json')
        assert json.loads(before.stdout)['ranks'][0]['updates'] > 0
        watching.send_signal(signal.SIGCONT)
        watching.stdout.readline()
        watching.kill()
    assert job.process.returncode == 0


@pytest.mark.parametrize('target, message', [
    ('4194305', 'found no job 4194305 of yours on this host. It may have finished'),
    ('none.py', 'found no job none.py of yours on this host')])
def test_what_is_no_job(target, message, usage_error):
    assert message in usage_error('top', target)


@pytest.mark.parametrize('user, message', [
    (None, 'nor any of its children is a rank that has created a communicator'),
    pytest.param(65534, r'belongs to user \w+, and only that user can watch it',
                 marks=pytest.mark.skipif(os.getuid() != 0, reason='needs root'))])
def test_processes_that_are_no_ranks(user, message, usage_error):
    with subprocess.Popen(['sleep', '60'], user=user) as process:
        said = usage_error('top', process.pid)
        assert process.poll() is None
        process.kill()
    assert re.search(message, said)


@pytest.mark.slow
def test_a_program_that_restores_sigpipe_and_forks(tmp_path):
    """A viewer that ends kills no rank; the child of a killed rank does not keep a viewer."""
    with start(tmp_path, 2, FORK) as job, subprocess.Popen(
            [sys.executable, '-m', 'chainermn', 'top', str(job.ranks[0]), '-n', '1000'],
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watching:
        watching.stdout.readline()
        for _ in range(2):
            top(job.ranks[0])  # the rank notices its end only later
        assert job.process.poll() is None
        (tmp_path / 'fork').touch()
        child = int(job.text('child'))
        try:
            os.kill(job.ranks[0], signal.SIGKILL)
            _, error = watching.communicate(timeout=seconds(30))
            assert 'failed or was killed' in error
        finally:
            os.kill(child, signal.SIGKILL)


def test_several_jobs_are_listed(tmp_path, monkeypatch):
    one, two = jobs.RunningJob('a.py', [10, 11]), jobs.RunningJob('b.py', [20])
    monkeypatch.setattr(jobs, '_jobs', lambda: [one, two])
    for target in 'b.py', '../b.py', '/somewhere/b.py':  # only the file name counts
        assert jobs.find(target) is two
    with pytest.raises(jobs.NoJobError, match=r'(?s)by its PID:\n  10  a.py, 2 ranks .*\n  20  b'):
        jobs.find(None)


@pytest.mark.parametrize('arguments, name', [
    (['python', 'a/train.py', '-x'], 'train.py'), (['python', '-u', '-m', 'pack.train', 'x'],
                                                   'pack.train'),
    (['python', '-W', 'error', '-X', 'dev', 'train.py'], 'train.py'),
    (['python', '-c', 'x'], 'python -c'), (['python', '-uIcx = 1'], 'python -c'),
    (['python', '-Werror', '-m', 'pack'], 'pack'),
    (['python'], 'python')])
def test_names_of_programs(arguments, name):
    assert jobs.program(arguments) == name


def message(n, at, busy, updates=0, **sample):
    return {'size': n, 'samples': [
        {'rank': rank, 'host': 'a', 'pid': 1, 'at': at, 'updates': updates,
         'operations': 0, 'cpu_seconds': 1.5 * at, 'rss_bytes': 0, 'gpu_bytes': 0, 'gpu': None,
         'log': {}, 'state': '', 'is_waiting': False, 'state_seconds': 0, 'age': 0, 'seconds': {
             name: at * ({'forward': busy(rank), 'waiting': 1 - busy(rank)}.get(name, 0))
             for name in NAMES}, **sample} for rank in range(n)]}


def test_a_straggler_of_64_ranks():
    samples = table.Samples()
    for at in (1, 3):
        samples.add(message(64, at, lambda rank: .9 if rank == 40 else .5, 10 * at))
    rows = samples.rows()
    assert [row.rank for row in rows if row.is_straggler] == [40]
    assert {row.updates_per_second for row in rows} == {10}
    assert {row.cpu_cores for row in rows} == {1.5}


def test_rates_are_those_of_the_last_seconds():
    samples = table.Samples()
    samples.add(message(1, 0, lambda _: 1))
    samples.add(message(1, 100, lambda _: 1, 5))
    assert samples.rows()[0].updates_per_second == pytest.approx(.05)  # there is no later one
    for second in range(1, 20):
        samples.add(message(1, 100 + second, lambda _: 1, 5 + 2 * second))
    assert samples.rows()[0].updates_per_second == pytest.approx(2)
    samples.add(message(1, 121, lambda _: 0, 99, seconds=dict.fromkeys(NAMES, 0.)))
    assert samples.rows()[0].shares is None  # nobody watched between: the totals began again


def test_the_page_lists_the_fields_of_json():
    """Also of a rank that does not respond, whose unknown values are null."""
    samples = table.Samples()
    samples.add(message(1, 0, lambda _: 1, gpu=[.5, 1, 2], log={'loss': float('nan'), 'x\x1b': 2.}))
    samples.add({'size': 2, 'samples': []})
    shown = json.loads(top_command._json('train.py', samples.rows()), parse_constant=pytest.fail)
    assert [*shown] == ['job', 'time', 'ranks']
    known, unknown = shown['ranks']
    assert [*known] == [*unknown] == FIELDS
    assert [known[f'gpu_{name}'] for name in ('utilization', 'used_bytes', 'total_bytes')] == [
        .5, 1, 2]
    assert known['log'] == {'loss': None, 'x\\x1b': 2}
    assert unknown == {**dict.fromkeys(FIELDS), 'rank': 1, 'is_silent': True, 'is_straggler': False,
                       'is_waiting': False}


def test_no_straggler_among_equals_and_without_numbers():
    samples = table.Samples()
    assert samples.rows() == []
    samples.add({'size': 3, 'samples': []})
    assert [row.note for row in samples.rows()] == ['does not respond'] * 3
    for at in (1, 2):
        samples.add(message(3, at, lambda rank: .5 + .04 * rank))
    assert not any(row.is_straggler for row in samples.rows())


def test_dump_and_top_use_one_file():
    """A request of one does not replace one of the other."""
    from chainermn._commands import running_ranks
    from chainermn._diagnostics import dump_request
    from chainermn._process import runtime

    with runtime.replaced():
        requests = runtime.get(dump_request._Requests)
        requests.file = os.memfd_create(dump_request.NAME + '12')
        try:
            name = next(path for path in pathlib.Path('/proc/self/fd').iterdir()
                        if path.name == str(requests.file))
            for text in (b'top ' + b'0' * 32 + b'\n', b'1', b'top ' + b'f' * 32 + b'\n'):
                with name.open('ab') as file:
                    file.write(text)
            assert running_ranks.job(os.getpid()) is not None
            assert dump_request.are_pending()
            assert dump_request.requests() == (True, ['0' * 32, 'f' * 32])
            assert dump_request.requests() == (False, []) and not dump_request.are_pending()
        finally:
            os.close(requests.file)


def test_wrong_numbers_of_updates(usage_error):
    assert 'argument -n: must be a positive integer, not 0' in usage_error('top', '-n', 0)
