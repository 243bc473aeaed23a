"""A hang aborts the job with a report that shows the state of each rank."""

import concurrent.futures
import os
import re

import pytest
from each_case import each_case
from jobs import run_job

import chainermn
from chainermn._diagnostics import devices, timeouts, watchdog

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


def start(folder, body, ranks=3, name='naive', timeout='3', **env):
    """Run a script; give exit status and what was printed."""
    folder.mkdir()
    done = run_job(folder, START.format(name=name) + body, ranks=ranks, limit=50,
                   CHAINERMN_TIMEOUT=timeout, **env)
    return done.returncode, done.stdout


#: Hangs, with lines of the report.
HANGS = {
    'one computes': (
        'load() if comm.rank == 1 else comm.allreduce(x)',
        ["ranks 0, 2 are in allreduce #4 float32 (1000,) op='sum', called at script.py:13 (for ",
         'rank 1 is not in an operation: it is at script.py:11 in load(); its last operation was '
         'allreduce ']),
    'endless loop': (
        'while comm.rank == 1: pass\ncomm.bcast_obj(1)',
        ['ranks 0, 2 are in bcast_obj #4 root=0, called at script.py:14 (for ',
         'rank 1 is not in an operation: it is at script.py:13; ']),
    'stopped': (
        'if comm.rank == 0: os.kill(os.getpid(), signal.SIGSTOP)\ncomm.allgather_obj(1)',
        ['rank 0 does not answer: stopped, or in code that holds the GIL',
         'ranks 1-2 are in allgather_obj #4, called at script.py:14 (for ']),
    'shared memory': (
        'from chainermn._transport.shared_memory.window import Window\n'
        'if comm.rank == 1: Window.publish = lambda self, count: load()\n'
        'y = comm.allreduce(np.ones(100000, "f"))',
        ["ranks 0-2 are in allreduce #4 float32 (100000,) op='sum', called at script.py:15 (",
         'window.py', 'in load']),
}
#: Deadlocks, with lines of the report.
DEADLOCKS = {
    'another operation, on some of the ranks': (
        'part = comm.new_group([0, 2])\n'
        'part.gather(x) if comm.rank == 0 else comm.barrier()',
        ['rank 0 is in gather #1 float32 (1000,) root=0 of the communicator of ranks 0, 2, '
         'called at script.py:14 (for ', 'ranks 1-2 are in barrier #5, called at script.py:14 (']),
    'another communicator of the same ranks': (
        'other = chainermn.create_communicator("naive")\n'
        '(comm if comm.rank else other).allreduce(x)',
        ["ranks 1-2 are in allreduce #4 float32 (1000,) op='sum', called at script.py:14 (for ",
         "rank 0 is in allreduce #1 float32 (1000,) op='sum' of communicator 2 of ranks 0-2, "
         'called at script.py:14 (for ', 'rank 0, communicator 2 of ranks 0-2: allreduce #1 ']),
}


QUEUE = """
queue = comm.mean_queue()
if comm.rank == 0:
    queue.submit({'w': x})
    queue.wait()
"""
#: Reported without a timeout, since the wait cannot end.
ENDED = {
    'recv': 'if comm.rank == 0: comm.recv(1, 3)',
    'recv_obj of any': 'if comm.rank == 0: comm.recv_obj(-2)',
    'irecv': 'if comm.rank == 0: comm.irecv(1, 3).wait()',
    'send': 'if comm.rank == 0: comm.send(x, 1, 3)',
    'another communicator': 'if comm.rank == 0: chainermn.create_communicator("naive")',
    # At the end the ranks agree on the world first.
    'a part': 'part = comm.split(0, comm.rank)\nif comm.rank == 0: part.barrier()',
    'a queue': QUEUE,
}
#: The others submit the last gradients late, and finish at once.
SLOW_QUEUE = """
queue = comm.mean_queue()
for n in range(3):
    queue.submit({'w': np.ones(1 << 20, 'f')})
    time.sleep(3 * (n == comm.rank))
    if n < 2: queue.wait()
if comm.rank: queue.wait()
"""
WENT_ON = 'print("went on", flush=True)'
#: Ranks that wait often, but never long.
SLOW = """
for n in range(12):
    time.sleep(.2 * (n % 2 == comm.rank % 2))
    comm.allreduce(x)
"""

JOBS = {
    **{name: ([body], {'name': 'flat' if name == 'shared memory' else 'naive'})
       for name, (body, _) in HANGS.items()},
    **{name: ([body], {'timeout': '1000'}) for name, (body, _) in DEADLOCKS.items()},
    **{name: ([body, 2], {'timeout': '0'}) for name, body in ENDED.items()},
    'limit of a part': (['comm.set_config("timeout", 1)\npart = comm.split(0, comm.rank)\n'
                         'load() if comm.rank else part.barrier()', 2], {'timeout': '1000'}),
    'limit of a queue': (['comm.set_config("timeout", 1)\n'
                          f'{QUEUE}load()', 2], {'timeout': '1000'}),
    'no limit': (['comm = chainermn.create_communicator("naive", timeout=0)\n'
                  f'time.sleep(3 * comm.rank)\ncomm.barrier()\n{WENT_ON}', 2], {}),
    'slow': ([SLOW + WENT_ON, 2], {}),
    'slow queue': ([SLOW_QUEUE + WENT_ON, 2], {'timeout': '0'}),
    'no communicator': (['from chainermn._diagnostics import watchdog\n'
                         'watchdog.get()._groups.clear()\n'
                         'if comm.rank == 2: load()\nchainermn.create_communicator("naive")'],
                        {}),
    'an error of the thread': (['from chainermn._diagnostics import thread_state\n'
                                'snapshots, times = thread_state.snapshots, iter(range(2))\n'
                                'def fails():\n'
                                '    for n in times: raise RuntimeError(n)\n'
                                '    return snapshots()\n'
                                'thread_state.snapshots = fails\n'
                                'load() if comm.rank == 1 else comm.allreduce(x)'], {}),
    'errors of the thread': (['from chainermn._diagnostics import thread_state\n'
                              'thread_state.snapshots = None\ntime.sleep(5)'], {}),
    'no number': ([''], {'timeout': '1 h'}),
}


def check_hang(name, status, output):
    assert status != 0
    for text in [*HANGS[name][1], 'the timeout is 3 s', 'Last operations:\n', 'Stacks of rank',
                 "communicator of ranks 0-2: allreduce #1-3 float32 (1000,) op='sum', called at "
                 'script.py:8']:
        assert text in output, output
    who, host = ('rank 1' if name == 'stopped' else 'rank 0'), os.uname().nodename
    assert len(re.findall('chainermn: ', output)) == 1
    assert re.match(rf'chainermn: {who} of 3 \(host {host}, process [0-9]+\) aborts the job: no '
                    'progress for [3-9] s', output), output


def check_deadlock(name, status, output):
    """Reported without a timeout."""
    assert status != 0
    for text in [*DEADLOCKS[name][1], 'Last operations:\n', 'Stacks of rank',
                 "communicator of ranks 0-2: allreduce #1-3 float32 (1000,) op='sum', called at "
                 'script.py:8']:
        assert text in output, output
    assert len(re.findall('chainermn: ', output)) == 1
    assert re.search(r'aborts the job: deadlock: rank 0 waits in \w+ #\d.* \(script.py:1[34]\) for '
                     r'ranks? [12-]+; rank [12] waits in ', output), output


def check_ended(name, status, output):
    """Waiting for a finished rank is reported without a timeout."""
    assert status != 0
    assert re.search(r'aborts the job: deadlock: rank 0 waits in \w+.* \(script.py:\d+\) for rank '
                     '1; rank 1 (has reached|waits at) the end of the program', output), output
    assert 'rank 1 is at the end of the program' in output


def check_only_itself(name, status, output):
    """Before the first communicator each rank reports only itself."""
    assert status != 0
    assert 'rank 0 is in create_communicator, called at script.py:16 (for ' in output
    assert 'does each of them call create_communicator?' in output
    assert len(re.findall('chainermn: ', output)) == 1  # rank 1 would have said the same


def check_goes_on(name, status, output):
    """The watchdog stops only after several errors."""
    assert status != 0 and 'RuntimeError' not in output
    assert 'rank 1 is not in an operation: it is at script.py:11 in load()' in output


def check_stops(name, status, output):
    assert (status, output.count('TypeError')) == (0, 3)
    assert output.count('has stopped because of this error') == 3


def check_no_number(name, status, output):
    assert status != 0
    text = "CHAINERMN_TIMEOUT must be a number of seconds, 0 for none, not '1 h'"
    assert output.count(text) == output.count('aborts the job') == 1, output


def check_part(name, status, output):
    """Parts of a communicator have the same timeout."""
    assert status != 0 and 'the timeout is 1 s' in output


def check_silent(name, status, output):
    """Slow ranks are not reported."""
    assert (status, output.count('went on'), 'chainermn' in output) == (0, 2, False)


#: What a job prints, and its exit status.
CHECKS = {
    **dict.fromkeys(HANGS, check_hang),
    **dict.fromkeys(DEADLOCKS, check_deadlock),
    **dict.fromkeys(ENDED, check_ended),
    'limit of a part': check_part,
    'limit of a queue': check_part,
    'no limit': check_silent,
    'slow': check_silent,
    'slow queue': check_silent,
    'no communicator': check_only_itself,
    'an error of the thread': check_goes_on,
    'errors of the thread': check_stops,
    'no number': check_no_number,
}


@pytest.fixture
def jobs(tmp_path):
    """All jobs, which take turns: most of the time they wait."""
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        yield {name: pool.submit(start, tmp_path / str(n), *args, **kwargs)
               for n, (name, (args, kwargs)) in enumerate(JOBS.items())}


@pytest.mark.slow
@pytest.mark.mpi_skip
@pytest.mark.limit(180)
@each_case('name', CHECKS)
def test_hangs_are_reported_and_slow_ranks_are_not(jobs, name):
    CHECKS[name](name, *jobs[name].result())


def test_all_jobs_are_checked():
    assert CHECKS.keys() == JOBS.keys()


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


def test_the_default_timeout_is_documented():
    assert '3600' in chainermn.create_communicator.__doc__ and timeouts.DEFAULT == 3600
    assert timeouts.VARIABLE in chainermn.create_communicator.__doc__


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
    """The first ranks have all responses, the one that raised the alarm some, the others one."""
    lost, size = range(20, 24), 32
    responded = [rank for rank in range(size) if rank not in lost]
    before = {rank: watchdog._reporters_before(rank, responded if rank < 16 else {rank})
              for rank in responded}
    before[19] = watchdog._reporters_before(19, {19, 24, 31})
    assert [rank for rank, number in before.items() if number == 0] == [0]
    # Without the first ranks, the one that raised the alarm reports.
    assert before[19] < min(before[rank] for rank in responded if rank > 15 and rank != 19)
