"""The checkpointer: what is kept, when, and that a run goes on with the same bits."""
import os
import re
import subprocess
import sys

import chainer
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn.extensions.checkpoint import _CheckpointStats
from chainermn.iterators import create_synchronized_iterator

WORLD = MPI.COMM_WORLD


@pytest.fixture(scope='module')
def comm():
    return chainermn.create_communicator('naive')


@pytest.fixture
def folder(comm, tmp_path):
    """One folder for all ranks."""
    return comm.bcast_obj(str(tmp_path))


def checkpointer_of(comm, **kwargs):
    name = kwargs.pop('name', 'run')
    with pytest.warns(DeprecationWarning, match='multi_node_snapshot'):
        return chainermn.create_multi_node_checkpointer(name, comm, **kwargs)


def make_trainer(comm, folder, stop=(12, 'iteration'), synchronized=False):
    np.random.seed(comm.rank)
    data = np.random.RandomState(5).normal(0, 1, (20, 3)).astype(np.float32)
    labels = (data.sum(axis=1) > 0).astype(np.int32)
    dataset = chainermn.scatter_dataset(chainer.datasets.TupleDataset(data, labels), comm)
    iterator = chainer.iterators.SerialIterator(dataset, 3)
    if synchronized:
        iterator = create_synchronized_iterator(iterator, comm)
    model = chainer.links.Classifier(chainer.Sequential(
        chainer.links.Linear(None, 4), lambda x: chainer.functions.dropout(x, 0.3),
        chainer.links.Linear(4, 2)))
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.1), comm).setup(model)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    return chainer.training.Trainer(updater, stop, out=folder), optimizer


def bits(trainer):
    model = trainer.updater.get_optimizer('main').target
    return [param.array.tobytes() for _, param in sorted(model.namedparams())]


@pytest.mark.parametrize('synchronized', [False, True])
@pytest.mark.parametrize('stop', [1, 2, 5, 9, 11])
def test_a_resumed_run_has_the_same_bits(comm, folder, stop, synchronized):
    """Over several epochs, with shuffling, dropout and momentum."""
    trainer, _ = make_trainer(comm, folder, synchronized=synchronized)
    trainer.run()
    expected = bits(trainer)

    first, _ = make_trainer(comm, folder, (stop, 'iteration'), synchronized)
    checkpointer = checkpointer_of(comm)
    checkpointer.finalize = lambda: None  # as if the run had been killed
    first.extend(checkpointer, trigger=(1, 'iteration'))
    first.run()

    trainer, optimizer = make_trainer(comm, folder, synchronized=synchronized)
    np.random.seed(99)
    checkpointer_of(comm).maybe_load(trainer, optimizer, path=folder)
    assert trainer.updater.iteration == stop
    trainer.run()
    assert bits(trainer) == expected
    assert comm.allgather_obj(bits(trainer)) == [expected] * comm.size


def test_without_the_optimizer_the_next_update_only_broadcasts(comm, folder):
    trainer, _ = make_trainer(comm, folder, (2, 'iteration'))
    trainer.run()
    checkpointer = checkpointer_of(comm, path=folder)
    checkpointer.save(trainer, 2)
    for argument, steps in [((), 1), (('optimizer',), 2)]:
        trainer, optimizer = make_trainer(comm, folder)
        checkpointer.maybe_load(trainer, *(optimizer for _ in argument))
        trainer.updater.update()
        assert optimizer.t == steps


def names(folder):
    return sorted(os.listdir(folder))


def test_file_names_and_what_is_kept(comm, folder):
    checkpointer = checkpointer_of(comm, cp_interval=2, gc_interval=3, path=folder)
    model = chainer.links.Linear(2, 2)
    kept = {1: [1], 2: [1, 2], 3: [2, 3], 4: [2, 3, 4], 5: [2, 3, 4, 5], 6: [5, 6]}
    for iteration, iterations in kept.items():
        checkpointer.save(model, iteration)
        comm.barrier()
        assert names(folder) == sorted(
            f'run.{rank}.{i}' for rank in range(comm.size) for i in iterations)
        comm.barrier()


def test_a_dot_in_the_name(comm, folder):
    model = chainer.links.Linear(2, 2)
    checkpointer_of(comm, name='resnet.v1.5', path=folder).save(model, 7)
    loaded = chainer.links.Linear(2, 2)
    checkpointer_of(comm, name='resnet.v1', path=folder).maybe_load(loaded)
    assert (loaded.W.array != model.W.array).any()
    checkpointer_of(comm, name='resnet.v1.5').maybe_load(loaded, path=folder)
    np.testing.assert_array_equal(loaded.W.array, model.W.array)


def test_the_newest_common_iteration_is_loaded(comm, folder):
    checkpointer = checkpointer_of(comm, path=folder)
    models = [chainer.links.Linear(2, 2) for _ in range(3)]
    for iteration, model in enumerate(models):
        checkpointer.save(model, iteration)
    comm.barrier()
    if comm.rank == comm.size - 1:
        os.remove(f'{folder}/run.{comm.rank}.2')
    loaded = chainer.links.Linear(2, 2)
    checkpointer_of(comm, path=folder).maybe_load(loaded)
    np.testing.assert_array_equal(loaded.W.array, models[1].W.array)


def test_a_damaged_file_is_passed_over(comm, folder):
    checkpointer = checkpointer_of(comm, path=folder)
    models = [chainer.links.Linear(2, 2) for _ in range(2)]
    for iteration, model in enumerate(models):
        checkpointer.save(model, iteration)
    with open(f'{folder}/run.{comm.rank}.1', 'r+b') as file:
        file.truncate(50)
    loaded = chainer.links.Linear(2, 2)
    checkpointer = checkpointer_of(comm, path=folder)
    if comm.rank == 0:
        with pytest.warns(RuntimeWarning, match='passed over'):
            checkpointer.maybe_load(loaded)
    else:
        checkpointer.maybe_load(loaded)
    np.testing.assert_array_equal(loaded.W.array, models[0].W.array)


def test_nothing_to_load(comm, folder):
    trainer, optimizer = make_trainer(comm, folder)
    checkpointer_of(comm).maybe_load(trainer, optimizer)
    assert trainer.updater.iteration == 0


def test_after_success_the_files_are_gone(comm, folder):
    trainer, _ = make_trainer(comm, folder, (4, 'iteration'))
    trainer.extend(checkpointer_of(comm), trigger=(1, 'iteration'))
    trainer.run()
    comm.barrier()
    assert names(folder) == []


@pytest.mark.parametrize('error', [RuntimeError, KeyboardInterrupt])
def test_after_an_error_the_files_stay(comm, folder, error):
    def fail(trainer):
        raise error('on purpose')

    trainer, _ = make_trainer(comm, folder, (4, 'iteration'))
    trainer.extend(checkpointer_of(comm), trigger=(1, 'iteration'))
    trainer.extend(fail, trigger=(3, 'iteration'), priority=-1000)
    with pytest.raises(error, match='on purpose'):
        trainer.run()
    comm.barrier()
    assert f'run.{comm.rank}.3' in names(folder)


@pytest.mark.skipif(os.geteuid() == 0 and sys.platform != 'linux', reason='takes /proc')
def test_an_error_of_one_rank_while_saving_is_raised_on_all(comm, folder):
    """The training state is untouched, and older checkpoints stay."""
    model = chainer.links.Linear(2, 2)
    checkpointer_of(comm, path=folder).save(model, 1)
    path = '/proc/no-files-here' if comm.rank == comm.size - 1 else folder
    with pytest.raises(OSError, match=f'rank {comm.size - 1}') as caught:
        checkpointer_of(comm, path=path).save(model, 2)
    assert comm.allgather_obj(str(caught.value)) == [str(caught.value)] * comm.size
    loaded = chainer.links.Linear(2, 2)
    checkpointer_of(comm, path=folder).maybe_load(loaded)
    np.testing.assert_array_equal(loaded.W.array, model.W.array)


def test_stats(comm, folder):
    checkpointer = checkpointer_of(comm, path=folder)
    checkpointer.save(chainer.links.Linear(2, 2), 1)
    assert re.search(r'avg=0\.\d+, min=0\.\d+, max=0\.\d+', checkpointer.get_stats())
    assert _CheckpointStats().report()


@pytest.mark.parametrize('arguments', [('a/b', 5, 5), ('run', 0, 5), ('run', 5, 0)])
def test_bad_arguments(comm, arguments):
    name, cp_interval, gc_interval = arguments
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match='name has to be'):
        chainermn.create_multi_node_checkpointer(name, comm, cp_interval, gc_interval)


def test_no_folder(comm):
    with pytest.raises(TypeError, match='path='):
        checkpointer_of(comm).save(chainer.links.Linear(2, 2), 1)


SCRIPT = '''
import os, signal, sys, warnings
warnings.simplefilter('ignore', DeprecationWarning)
import chainermn
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import importlib.util
spec = importlib.util.spec_from_file_location('tests_of_checkpoint', sys.argv[1])
tests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tests)
comm = chainermn.create_communicator('naive')
folder, victim, when = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
trainer, optimizer = tests.make_trainer(comm, folder)
checkpointer = chainermn.create_multi_node_checkpointer('run', comm)
trainer.extend(checkpointer, trigger=(1, 'iteration'))
checkpointer.maybe_load(trainer, optimizer)
print('starts at', trainer.updater.iteration)

def die(trainer):
    if comm.rank == victim and trainer.updater.iteration == when:
        os.kill(os.getpid(), signal.SIGKILL)

trainer.extend(die, trigger=(1, 'iteration'), priority=int(sys.argv[5]))
trainer.run()
print('ends with', hash(b''.join(tests.bits(trainer))))
'''


@pytest.mark.skipif(WORLD.size > 1, reason='starts mpiexec itself')
@pytest.mark.parametrize('victim, when, priority', [
    (0, 1, 1000), (1, 4, 1000), (0, 7, -1000), (1, 12, -1000)])
def test_a_run_that_was_killed_goes_on_with_the_same_bits(tmp_path, victim, when, priority):
    """Killed before or after the iteration's checkpoint, on either rank."""
    script = tmp_path / 'script.py'
    script.write_text(SCRIPT)

    def run(folder, victim):
        return subprocess.run(
            ['mpiexec', '-n', '2', sys.executable, str(script), __file__, str(tmp_path / folder),
             str(victim), str(when), str(priority)],
            capture_output=True, text=True, timeout=50,
            env={**os.environ, 'PYTHONHASHSEED': '0'})

    whole = run('whole', -1)
    assert whole.returncode == 0, whole.stderr
    killed = run('killed', victim)
    assert killed.returncode != 0 and 'ends with' not in killed.stdout
    again = run('killed', -1)
    assert again.returncode == 0, again.stderr
    start = int(re.search(r'starts at (\d+)', again.stdout)[1])
    assert when - 2 <= start <= when
    ends = set(re.findall(r'ends with (-?\d+)', whole.stdout + again.stdout))
    assert len(ends) == 1
