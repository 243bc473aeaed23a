"""Chainer starts processes by fork, with every Python, unless the program chose another method."""

import subprocess
import sys

import pytest
from time_limits import seconds

pytestmark = pytest.mark.mpi_skip

# As it runs with Python 3.13. With forkserver, the default since 3.14, each process imports this
# script, which initializes MPI and would start processes, and it fails to unpickle the lambdas.
SCRIPT = '''
import multiprocessing, sys, warnings
from mpi4py import MPI
import chainer, numpy
from chainer import iterators, training
from chainer.training import extensions, updaters
from chainer.training.extensions import snapshot_writers
from chainer.training.updaters import multiprocess_parallel_updater
import chainermn

warnings.filterwarnings('ignore', '.* multi-threaded, use of fork', DeprecationWarning)
lock = multiprocessing.Lock()  # settles on a start method, but is no choice
comm = chainermn.create_communicator('naive')

data = chainer.datasets.TransformDataset(numpy.eye(6, dtype='f'), lambda x: (x, x.argmax()))
batches = iterators.MultiprocessIterator(data, 2, n_processes=2)
classifier = chainer.links.Classifier(chainer.links.Linear(6, 6))
optimizer = chainer.optimizers.SGD().setup(classifier)
trainer = training.Trainer(updaters.StandardUpdater(batches, optimizer), (3, 'iteration'),
                           out=f'result-{comm.rank}')
def save(path, target):
    numpy.savez(path, **target)
writers = {'process.npz': snapshot_writers.ProcessWriter(lambda *args: save(*args)),
           'queue.npz': snapshot_writers.ProcessQueueWriter(save)}
for name, writer in writers.items():
    trainer.extend(extensions.snapshot(writer=writer, filename=name), trigger=(3, 'iteration'),
                   name=name)
trainer.run()
for name in writers:
    numpy.load(f'{trainer.out}/{name}').close()

class Worker(multiprocess_parallel_updater._Worker):
    def __init__(self):
        multiprocessing.Process.__init__(self)
        self.status = lambda: 3

    def run(self):
        sys.exit(self.status())

worker = Worker()
worker.start()
worker.join()
assert worker.exitcode == 3, worker.exitcode
assert comm.allreduce_obj(1) == 2
print('finished\\n', end='', flush=True)
'''


def test_a_script_without_main_guard(tmp_path):
    script = tmp_path / 'script.py'
    script.write_text(SCRIPT)
    done = subprocess.run(
        ['mpiexec', '-n', '2', sys.executable, '-W', 'error', str(script)], cwd=tmp_path,
        timeout=seconds(50), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines() == ['finished'] * 2


CHOICES = '''
import multiprocessing
import chainer
from chainer.iterators import multiprocess_iterator

def check(expected):
    assert multiprocess_iterator.multiprocessing.get_start_method() == expected
    multiprocessing.set_start_method(None, force=True)  # forget all choices

check('fork')
lock = multiprocessing.Lock()
check('fork')
for method in multiprocessing.get_all_start_methods():
    multiprocessing.set_start_method(method)
    check(method)
    lock = multiprocessing.Lock()
    multiprocessing.set_start_method(method, force=True)
    check(method)
check('fork')
'''


def test_choices_of_the_program(python):
    python(CHOICES)


SNAPSHOTS = '''
import multiprocessing, os, types
import chainer
from chainer.training import extensions
from chainer.training.extensions import snapshot_writers

if __name__ == '__main__':
    multiprocessing.set_start_method('forkserver')
    for kind in [snapshot_writers.ProcessWriter, snapshot_writers.ProcessQueueWriter]:
        trainer = types.SimpleNamespace(out=kind.__name__, count=0)
        os.mkdir(trainer.out)
        snapshot = extensions.snapshot(
            target=chainer.links.Scale(W_shape=1), writer=kind(), n_retains=1,
            filename='snapshot-{.count}')
        snapshot.initialize(trainer)
        for trainer.count in range(2):
            snapshot(trainer)
        snapshot.finalize()
        assert os.listdir(trainer.out) == ['snapshot-1'], os.listdir(trainer.out)
'''


def test_snapshots_with_forkserver(python, tmp_path):
    tmp_path.joinpath('main.py').write_text(SNAPSHOTS)
    python('import subprocess, sys; '
           'subprocess.run([sys.executable, "-Werror", "main.py"], check=True)')
