"""``chainermn dump`` and SIGUSR1 print what all ranks are doing; the job continues."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from jobs import WRITE_PROCESS, RunningJob
from time_limits import seconds, wait_until

from chainermn._commands import running_ranks

pytestmark = pytest.mark.mpi_skip
HEAD = '''
import os, pathlib, signal, time
import chainermn
comm = chainermn.create_communicator('naive')
''' + WRITE_PROCESS
#: Rank 0 waits for rank 1 in a barrier.
BARRIER = HEAD + '''
def wait():
    while not os.path.exists('end'):
        time.sleep(.01)

if comm.rank == 1:
    wait()
comm.barrier()
print('went on', flush=True)
'''


#: Both ranks compute most of the time, and never differ by more than one barrier.
STEPS = HEAD + '''
def compute():
    time.sleep({step})

while not comm.allreduce_obj(os.path.exists('end'), op='max'):
    comm.barrier()
    compute()
print('went on', flush=True)
'''


def start(folder, script):
    job = RunningJob(folder, script)
    time.sleep(1)  # rank 0 enters the barrier
    return job


def read(job, last):
    """Wait for the last line of a report; return the output so far."""
    report = ''
    while last not in report:
        line = job.process.stdout.readline()
        assert line, report
        report += line
    return report


def finish(job, last):
    """Wait for the last line of a report, let the job continue, and return its output."""
    report = read(job, last)
    (job.folder / 'end').touch()
    output, _ = job.process.communicate(timeout=seconds(60))
    assert (job.process.returncode, output.count('went on')) == (0, 2), output
    return report + output.replace('went on\n', '')


def dump(process):
    return subprocess.run([sys.executable, '-m', 'chainermn', 'dump', str(process)], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)


@pytest.mark.slow
def test_the_states_are_of_one_moment_and_have_the_right_durations(tmp_path):
    step = seconds(.25)
    job = start(tmp_path, STEPS.replace('{step}', str(step)))
    reports = []
    for _ in range(4):  # at different times of the polls
        assert dump(job.ranks[1]).returncode == 0
        reports.append(read(job, 'Last operations:'))
    finish(job, '')
    for report in reports:
        states = report.partition('as requested')[2]
        for duration in re.findall(r'in compute\(\).*\(for (?:\d+-)?(\d+) s\)', states):
            assert int(duration) <= step + 1, report
        barriers = [int(n) for n in re.findall(r'(?:barrier|allreduce_obj) #(\d+)', states)]
        assert max(barriers) - min(barriers) <= 2, report  # two operations per step


@pytest.mark.sample(1)
@pytest.mark.parametrize('target', ['rank 0', 'rank 1', 'mpiexec', 'signal'])
def test_the_state_of_all_ranks_is_printed(tmp_path, target):
    job = start(tmp_path, BARRIER)
    if target == 'signal':
        os.kill(job.ranks[0], signal.SIGUSR1)  # while it waits in MPI
    else:
        done = dump({'rank 0': job.ranks[0], 'rank 1': job.ranks[1],
                     'mpiexec': job.process.pid}[target])
        assert done.returncode == 0 and 'Notified the rank in process' in done.stdout
    output = finish(job, 'Stacks of rank 1 ')
    assert output.count('chainermn: ') == 1, output
    for text in ['rank 0 is in barrier #1, called at script.py:15 (for ',
                 'rank 1 is not in an operation: it is at script.py:11 in wait()',
                 'Last operations:\n', 'Stacks of rank 0 ', 'Stacks of rank 1 ']:
        assert text in output, output


def test_processes_that_are_no_ranks_are_left_alone(usage_error):
    with subprocess.Popen(['sleep', '60']) as process:
        assert f'neither process {process.pid} nor any of its children is a rank of yours' in (
            usage_error('dump', process.pid))
        assert process.poll() is None
        process.kill()
    assert 'there is no process' in usage_error('dump', 2 ** 22 + 1)


def test_a_parent_of_several_jobs(tmp_path, usage_error):
    for name in ('a', 'b'):
        (tmp_path / name).mkdir()
        (tmp_path / name / f'{name}.py').write_text(HEAD + '''
while not os.path.exists('../end'):
    time.sleep(.1)
''')
    start_jobs = ' '.join(f'(cd {name}; exec mpiexec -n 1 {sys.executable} {name}.py) &'
                          for name in ('a', 'b'))
    with subprocess.Popen(['sh', '-c', f'{start_jobs} wait'], cwd=tmp_path,
                          stdin=subprocess.DEVNULL) as process:
        try:
            for name in ('a', 'b'):
                wait_until((tmp_path / name / 'process0').exists, 60)
            said = [usage_error(command, process.pid) for command in ('dump', 'top')]
        finally:
            (tmp_path / 'end').touch()
    for text in said:
        assert f'several jobs run under process {process.pid}; select one by its PID:\n' in text
        for name in ('a', 'b'):
            rank = (tmp_path / name / 'process0').read_text()
            assert f'  {rank}  {name}.py, 1 rank on this host\n' in text


def test_jobs_that_a_rank_starts_do_not_count(monkeypatch):
    parents = {2: 1, 3: 2, 4: 3, 5: 1, 6: 5}
    monkeypatch.setattr(running_ranks, 'processes', lambda: [1, *parents])
    monkeypatch.setattr(running_ranks, '_parent', lambda process: parents.get(process, 0))
    monkeypatch.setattr(running_ranks, 'job', {2: 'job', 4: 'inner', 6: 'job'}.get)
    assert running_ranks.below(1) == [2, 6]
    assert running_ranks.below(3) == [4]


@pytest.mark.slow
def test_a_single_rank_answers(tmp_path):
    """Until someone asks, it has no second thread, which could make a fork unsafe."""
    (tmp_path / 'script.py').write_text('''
import os, threading
import chainer, numpy as np
import chainermn

comm = chainermn.create_communicator('naive')
model = chainer.links.Linear(3, 2)
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)
while not os.path.exists('end'):
    optimizer.update(lambda: chainer.functions.sum(model(np.ones((1, 3), 'f'))))
    if optimizer.t == 1:
        assert threading.active_count() == 1
        if not os.fork():
            os._exit(0)
        os.wait()
        print(os.getpid(), flush=True)
''')
    with subprocess.Popen([sys.executable, '-W', 'error', 'script.py'], cwd=tmp_path, text=True,
                          env={**os.environ, 'OMP_NUM_THREADS': '1'},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert dump(process.stdout.readline().strip()).returncode == 0
        output = process.stdout.readline()
        (tmp_path / 'end').touch()
        output += process.stdout.read()
    assert process.returncode == 0 and 'unknown' not in output, output
    assert 'the state of all ranks, as requested' in output and 'Stacks of rank 0' in output

