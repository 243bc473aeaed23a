"""A hang aborts the job with a report that shows the state of each rank."""

import concurrent.futures
import os
import re
from typing import NamedTuple

import pytest
from each_case import each_case
from jobs import run_job

import chainermn
from chainermn._diagnostics import devices, watchdog

START = '''
import os, signal, sys, time
import numpy as np
import chainermn
comm = chainermn.create_communicator('{name}')
x = np.ones(1000, 'f')
for _ in range(3):
    comm.allreduce(x)

def load():
    time.sleep(60)

'''


class Case(NamedTuple):
    """A program, and what its job prints."""

    body: str
    texts: list[str]  # patterns
    ranks: int = 3
    timeout: str = '3'
    name: str = 'naive'
    reports: int = 1
    succeeds: bool = False


def hang(body, *texts, who=0, **options):
    """A job that is aborted after the timeout, with the state of each rank."""
    host = os.uname().nodename
    return Case(body, [
        rf'^chainermn: rank {who} of 3 \(host {host}, process [0-9]+\) aborts the job: no progress '
        'for [3-9] s', *map(re.escape, texts), 'the timeout is 3 s', 'Last operations:\n',
        'Stacks of rank', r"communicator of ranks 0-2: allreduce #1-3 float32 \(1000,\) op='sum', "
        'called at script.py:8'], **options)


def ended(body):
    """A job that is aborted without a timeout, because rank 0 waits for a finished rank."""
    return Case(body, [
        r'aborts the job: deadlock: rank 0 waits in \w+.* \(script.py:\d+\) for rank 1; rank 1 '
        '(has reached|waits at) the end of the script', 'rank 1 is at the end of the script'],
        ranks=2, timeout='0')


def silent(body, timeout):
    """A job with slow ranks, which are not reported."""
    return Case(f'{body}\nprint("went on", flush=True)', [r'went on(.|\n)*went on'], 2, timeout,
                reports=0, succeeds=True)


QUEUE = """
queue = comm.mean_queue()
if comm.rank == 0:
    queue.submit({'w': x})
    queue.wait()
"""
#: The other ranks submit the last gradients late, then finish immediately.
SLOW_QUEUE = """
queue = comm.mean_queue()
for n in range(3):
    queue.submit({'w': np.ones(1 << 20, 'f')})
    time.sleep(3 * (n == comm.rank))
    if n < 2: queue.wait()
if comm.rank: queue.wait()
"""
#: Ranks that wait often, but never long.
SLOW = """
for n in range(12):
    time.sleep(.2 * (n % 2 == comm.rank % 2))
    comm.allreduce(x)
"""
FAILS_TWICE = """
from chainermn._diagnostics import thread_state
snapshots, times = thread_state.snapshots, iter(range(2))
def fails():
    for n in times: raise RuntimeError(n)
    return snapshots()
thread_state.snapshots = fails
load() if comm.rank == 1 else comm.allreduce(x)
"""

#: All ranks are stopped for longer than the timeout, while rank 0 waits.
SUSPENDED = """
import subprocess
pids = ' '.join(map(str, comm.allgather_obj(os.getpid())))
if comm.rank == 0:
    subprocess.Popen(['sh', '-c', f'sleep .5; kill -STOP {pids}; sleep 6; kill -CONT {pids}'])
for _ in range(20 * (comm.rank > 0)): time.sleep(.1)
comm.allreduce(x)
print('went on', flush=True)
load() if comm.rank == 1 else comm.allreduce(x)
"""

CASES = {
    'suspended, and hangs later': Case(
        SUSPENDED, ['went on\n(.*\n)*went on', 'aborts the job: no progress for [3-9] s',
                    r'allreduce #6 float32 \(1000,\)']),
    'one computes': hang(
        'load() if comm.rank == 1 else comm.allreduce(x)',
        "ranks 0, 2 are in allreduce #4 float32 (1000,) op='sum', called at script.py:13 (for ",
        'rank 1 is not in an operation: it is at script.py:11 in load(); its last operation was '
        'allreduce '),
    'endless loop': hang(
        'while comm.rank == 1: pass\ncomm.bcast_obj(1)',
        'ranks 0, 2 are in bcast_obj #4 root=0, called at script.py:14 (for ',
        'rank 1 is not in an operation: it is at script.py:13; '),
    'stopped': hang(
        'if comm.rank == 0: os.kill(os.getpid(), signal.SIGSTOP)\ncomm.allgather_obj(1)',
        'rank 0 does not respond: the rank is stopped, or runs code that holds the GIL',
        'ranks 1-2 are in allgather_obj #4, called at script.py:14 (for ', who=1),
    'shared memory': hang(
        'from chainermn._transport.shared_memory.window import Window\n'
        'if comm.rank == 1: Window.publish = lambda self, count: load()\n'
        'y = comm.allreduce(np.ones(100000, "f"))',
        "ranks 0-2 are in allreduce #4 float32 (100000,) op='sum', called at script.py:15 (",
        'in allreduce', 'in load', name='flat'),
    'recv': ended('if comm.rank == 0: comm.recv(1, 3)'),
    'send': ended('if comm.rank == 0: comm.send(x, 1, 3)'),
    # At the end of the script, the ranks first check the communicator of all ranks.
    'a part': ended('part = comm.split(0, comm.rank)\nif comm.rank == 0: part.barrier()'),
    'a queue': ended(QUEUE),
    # Parts of a communicator have the same timeout.
    'limit of a part': Case(
        'comm.set_config("timeout", 1)\npart = comm.split(0, comm.rank)\n'
        'load() if comm.rank else part.barrier()', ['the timeout is 1 s'], 2, '1000'),
    'limit of a queue': Case(f'comm.set_config("timeout", 1)\n{QUEUE}load()',
                             ['the timeout is 1 s'], 2, '1000'),
    'no limit': silent('comm = chainermn.create_communicator("naive", timeout=0)\n'
                       'time.sleep(3 * comm.rank)\ncomm.barrier()', '3'),
    'slow': silent(SLOW, '3'),
    'slow queue': silent(SLOW_QUEUE, '0'),
    # Without a communicator, each rank reports only itself; only the first report is printed.
    'no communicator': Case(
        'from chainermn._diagnostics import watchdog\nwatchdog.get()._groups.clear()\n'
        'if comm.rank == 2: load()\nchainermn.create_communicator("naive")',
        [r'rank 0 is in create_communicator, called at script.py:16 \(for ',
         r'does each of them call create_communicator\?']),
    # The watchdog stops only after several errors.
    'two errors of the thread': Case(FAILS_TWICE, [
        r'rank 1 is not in an operation: it is at script.py:11 in load\(\)',
        r'\A((?!RuntimeError)(.|\n))*\Z']),
    'errors of the thread': Case(
        'from chainermn._diagnostics import thread_state\n'
        'thread_state.snapshots = None\ntime.sleep(5)',
        ['(TypeError(.|\n)*){3}', 'has stopped because of this error'], reports=3, succeeds=True),
    'no number': Case('', [r"_TIMEOUT must be a number of seconds \(0 disables it\), not '1 h'",
                           'aborts the job'], timeout='1 h'),
}


def start(folder, case):
    folder.mkdir()
    return run_job(folder, START.format(name=case.name) + case.body, ranks=case.ranks, limit=50,
                   CHAINERMN_TIMEOUT=case.timeout)


@pytest.fixture
def jobs(tmp_path):
    """All jobs, six at a time, because they mostly wait."""
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        yield {name: pool.submit(start, tmp_path / str(n), case)
               for n, (name, case) in enumerate(CASES.items())}


@pytest.mark.slow
@pytest.mark.mpi_skip
@pytest.mark.limit(180)
@each_case('name', CASES)
def test_hangs_are_reported_and_slow_ranks_are_not(jobs, name):
    case, done = CASES[name], jobs[name].result()
    assert (done.returncode == 0) == case.succeeds, done.stdout
    assert done.stdout.count('chainermn: ') == case.reports, done.stdout
    for text in case.texts:
        assert re.search(text, done.stdout), (text, done.stdout)


@pytest.mark.parametrize('value', [-1, float('nan'), float('inf'), 'soon'])
def test_an_invalid_timeout_raises_a_value_error(value, same_error):
    error = same_error(lambda: chainermn.create_communicator('naive', timeout=value))
    assert isinstance(error, ValueError)
    assert 'a timeout must be a number of seconds' in str(error)


def test_a_timeout_of_another_type_raises_a_type_error(same_error):
    for value in (True, [3]):
        error = same_error(lambda value=value: chainermn.create_communicator(
            'naive', timeout=value))
        assert type(error) is TypeError


def test_the_timeout_is_a_configuration_item():
    comm = chainermn.create_communicator('naive', timeout=500)
    assert comm.get_config('timeout') == comm.timeout == 500
    comm.set_config('timeout', None)
    assert comm.timeout is None
    comm.set_config('timeout', '7.5')
    part = comm.split(0, comm.rank)
    assert part.timeout == 7.5 and part._flight_records()[1].timeout == 7.5
    part.finalize()
    comm.finalize()


def test_all_communicators_share_one_watchdog(comm):
    dog = watchdog.get()
    assert dog is watchdog.get()
    assert (dog._thread is not None) == (comm.size > 1)
    before = len(dog._groups)
    comm.split(0, comm.rank).finalize()
    assert len(dog._groups) == before


@pytest.mark.parametrize('limit, said', [
    (1., 'timeout is 1 s'), (0., ''), (3., ''), (None, 'timeout is 1.5 s')])
def test_exchanges_on_a_device_have_the_timeout_of_their_communicator(monkeypatch, limit, said):
    class Exchanges:
        def __init__(self):
            self.timeout = limit

        def error(self):
            return ''

        def running(self):
            return 2., 'a sum'

        def abort(self):
            raise AssertionError

    exchanges = Exchanges()
    devices.add(exchanges)
    try:
        found = devices.failure(1.5)
    finally:
        devices.remove(exchanges)
    assert said in found and bool(said) == bool(found)
    assert devices.failure(1.5) == ''


def test_one_of_many_ranks_reports_a_lost_host():
    """The first ranks get all responses, the rank that raised the alarm gets some."""
    lost, size = range(20, 24), 32
    responded = [rank for rank in range(size) if rank not in lost]
    before = {rank: watchdog._reporters_before(rank, responded if rank < 16 else {rank})
              for rank in responded}
    before[19] = watchdog._reporters_before(19, {19, 24, 31})
    assert [rank for rank, number in before.items() if number == 0] == [0]
    # Without the first ranks, the one that raised the alarm reports.
    assert before[19] < min(before[rank] for rank in responded if rank > 15 and rank != 19)

