"""``chainermn dump`` and SIGUSR1 print what all ranks are doing; the job continues."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from time_limits import seconds

pytestmark = pytest.mark.mpi_skip
SCRIPT = '''
import os, pathlib, signal, time
import chainermn
{before}
comm = chainermn.create_communicator('naive')
pathlib.Path(f'rank{{comm.rank}}').write_text(str(os.getpid()))
pathlib.Path(f'rank{{comm.rank}}').rename(f'process{{comm.rank}}')

def wait():
    while not os.path.exists('end'):
        time.sleep(.01)

if comm.rank == 1:
    wait()
comm.barrier()
print('went on', flush=True)
'''


#: Both ranks compute most of the time, and never differ by more than one barrier.
STEPS = '''
def compute():
    time.sleep({step})

while not comm.allreduce_obj(os.path.exists('end'), op='max'):
    comm.barrier()
    compute()
print('went on', flush=True)
'''


class Job:
    """A job of two ranks; by default rank 0 waits for rank 1 in a barrier."""

    def __init__(self, folder, before='', script=SCRIPT):
        (folder / 'script.py').write_text(script.format(before=before))
        self.folder = folder
        self.process = subprocess.Popen(
            ['mpiexec', '-n', '2', sys.executable, 'script.py'], cwd=folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, 'CHAINERMN_STALL_WARNING': '0'})
        self.ranks = [self.process_of(rank) for rank in range(2)]
        time.sleep(1)  # rank 0 enters the barrier

    def process_of(self, rank):
        path = self.folder / f'process{rank}'
        end = time.monotonic() + seconds(60)
        while not path.exists():
            assert time.monotonic() < end and self.process.poll() is None
            time.sleep(.01)
        return int(path.read_text())

    def read(self, last):
        """Wait for the last line of a report; return the output so far."""
        report = ''
        while last not in report:
            line = self.process.stdout.readline()
            assert line, report
            report += line
        return report

    def finish(self, last):
        """Wait for the last line of a report, let the job go on, and return its output."""
        report = self.read(last)
        (self.folder / 'end').touch()
        output, _ = self.process.communicate(timeout=seconds(60))
        assert (self.process.returncode, output.count('went on')) == (0, 2), output
        return report + output.replace('went on\n', '')


def dump(process):
    return subprocess.run([sys.executable, '-m', 'chainermn', 'dump', str(process)], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)


@pytest.mark.slow
def test_the_states_are_of_one_moment_and_have_the_right_durations(tmp_path):
    head = SCRIPT.partition('def wait')[0]
    step = seconds(.25)
    job = Job(tmp_path, script=head + STEPS.replace('{step}', str(step)))
    reports = []
    for _ in range(4):  # at different times of the polls
        assert dump(job.ranks[1]).returncode == 0
        reports.append(job.read('Last operations:'))
    job.finish('')
    for report in reports:
        states = report.partition('as requested')[2]
        for duration in re.findall(r'in compute\(\).*\(for (?:\d+-)?(\d+) s\)', states):
            assert int(duration) <= step + 1, report
        barriers = [int(n) for n in re.findall(r'(?:barrier|allreduce_obj) #(\d+)', states)]
        assert max(barriers) - min(barriers) <= 2, report  # two operations per step


@pytest.mark.sample(1)
@pytest.mark.parametrize('target', ['rank 0', 'rank 1', 'mpiexec', 'signal'])
def test_the_state_of_all_ranks_is_printed(tmp_path, target):
    job = Job(tmp_path)
    if target == 'signal':
        os.kill(job.ranks[0], signal.SIGUSR1)  # while it waits in MPI
    else:
        done = dump({'rank 0': job.ranks[0], 'rank 1': job.ranks[1],
                     'mpiexec': job.process.pid}[target])
        assert done.returncode == 0 and 'Notified the rank in process' in done.stdout
    output = job.finish('Stacks of rank 1 ')
    assert output.count('chainermn: ') == 1, output
    for text in ['rank 0 is in barrier #1, called at script.py:15 (for ',
                 'rank 1 is not in an operation: it is at script.py:11 in wait()',
                 'Last operations:\n', 'Stacks of rank 0 ', 'Stacks of rank 1 ']:
        assert text in output, output


@pytest.mark.full
def test_the_program_may_handle_the_signal_itself(tmp_path):
    job = Job(tmp_path, 'signal.signal(signal.SIGUSR1, lambda *_: print("mine", flush=True))')
    os.kill(job.ranks[1], signal.SIGUSR1)
    time.sleep(.5)
    assert dump(job.ranks[0]).returncode == 0
    output = job.finish('Stacks of rank 1 ')
    assert output.startswith('mine\nchainermn: the state of all ranks, as requested\n')
    assert output.count('mine') == 1


@pytest.mark.slow
def test_processes_that_are_no_ranks_are_left_alone():
    with subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE) as process:
        done = dump(process.pid)
        assert done.returncode == 2
        assert f'process {process.pid} and its children contain no rank of yours' in done.stdout
        process.communicate(b'\n')
    assert process.returncode == 0
    done = dump(2 ** 22 + 1)
    assert done.returncode == 2 and 'there is no process' in done.stdout


@pytest.mark.slow
def test_a_single_rank_answers(tmp_path):
    """It has no thread that could disturb a fork before somebody asks."""
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
