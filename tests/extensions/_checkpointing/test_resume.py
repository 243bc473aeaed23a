"""Each rank loads its file, or one rank reads for others; errors are raised on all."""
import os

import chainer
import numpy as np
import pytest
from shared_fixtures import raises_on_all

import chainermn
from chainermn.extensions._checkpointing import progress, rank_file, resume, state
from chainermn.extensions._checkpointing.parts import SavedParts
from chainermn.extensions._checkpointing.resume import CheckedDeserializer, Differences
from chainermn.extensions._checkpointing.selection import Selection

pytestmark = pytest.mark.usefixtures('own_folder')


def written(tmp_path, value):
    model = chainer.links.Linear(2, 2, initialW=value)
    path = str(tmp_path / 'file')
    rank_file.write(path, state.copy_state(model), rank_file.Tag('a-1', 1, 1, [0], 0))
    return path


def load(comm, selection, group=None):
    model = chainer.links.Linear(2, 2)
    resume.load(comm, selection, SavedParts(model), False, group)
    comm.barrier()
    return model.W.array[0, 0]


def test_rank_0_reads_for_all(comm, tmp_path):
    path = written(tmp_path, 7) if comm.rank == 0 else None
    selection = Selection(1, path, comm.size + 1, True)
    if comm.rank == 0:
        with pytest.warns(RuntimeWarning, match=f'by {comm.size + 1} ranks and is loaded on '
                                                f'{comm.size}'):
            assert load(comm, selection) == 7
    else:
        assert load(comm, selection) == 7


@pytest.mark.parametrize('readers', ['first', 'each', 'of groups'])
def test_a_file_that_is_gone_is_one_error(comm, tmp_path, readers):
    path, last = written(tmp_path, 7), comm.size - 1
    group = comm.split(int(comm.rank == last), comm.rank) if readers == 'of groups' else None
    if comm.rank == (last if readers == 'each' else 0):
        os.remove(path)
    with raises_on_all(FileNotFoundError):
        load(comm, Selection(1, path, comm.size, readers == 'first'), group)


def test_python_objects_are_refused_before_anything_is_loaded(comm, tmp_path):
    path = str(tmp_path / 'file.npz')
    last = comm.rank == comm.size - 1
    objects = np.array([None], dtype=object) if last else np.zeros(1)
    np.savez(path, W=np.ones((2, 2)), b=np.ones(2), z=objects)
    model = chainer.links.Linear(2, 2, initialW=5)
    with raises_on_all(ValueError, match="'z' is an array of Python objects"):
        resume.load(comm, Selection(1, path, comm.size, False), SavedParts(model), False)
        comm.barrier()
    if last:
        assert (model.W.array == 5).all()


@pytest.mark.parametrize('save, load, difference', [
    (dict(shuffle=False), dict(shuffle=True), 'updater/iterator:main/_order is missing'),
    (dict(shuffle=False), dict(shuffle=False, length=4),
     'updater/iterator:main/current_position is 6 in the file, but the dataset of the script '
     'has 4 examples')])
def test_a_program_that_differs_is_one_error(comm, tmp_path, save, load, difference):
    def trainer_of(length=20, shuffle=None):
        return make_trainer(length, 2, 3, shuffle)

    path = str(tmp_path / 'file')
    trainer = trainer_of(**save)
    trainer.run()
    rank_file.write(path, state.copy_state(trainer), rank_file.Tag('a-1', 3, 1, [0], 0))
    with raises_on_all(ValueError, match='the script does not match the checkpoint') as caught:
        resume.load(
            comm, Selection(3, path, comm.size, False), SavedParts(trainer_of(**load)), False)
    assert difference in str(caught.value)


# --- another number of ranks ------------------------------------------------------------------

class Counts(chainer.training.Extension):
    """Has a state; with another name than in the file it is not found."""

    def __init__(self):
        self.count = 0

    def __call__(self, trainer):
        self.count += 1

    def serialize(self, serializer):
        self.count = serializer('count', self.count)


def make_trainer(length, batch, iterations, shuffle=None, name='Counts', kind=None):
    kind = kind or chainer.iterators.SerialIterator
    iterator = kind(list(range(length)), batch, shuffle=shuffle)
    model = chainer.links.Linear(1, 1)
    updater = chainer.training.StandardUpdater(
        iterator, chainer.optimizers.MomentumSGD().setup(model), loss_func=lambda x: chainer.
        functions.sum(model(chainer.as_variable(np.ones((1, 1), np.float32)))),
        converter=lambda batch, device: np.array(batch))
    trainer = chainer.training.Trainer(updater, (iterations, 'iteration'))
    trainer.extend(Counts(), name=name, trigger=(1, 'iteration'))
    return trainer


def saved_arrays(trainer):
    trainer.run()
    return {**state.copy_state(trainer), **progress.capture_epochs(SavedParts(trainer))}


def load_resized(arrays, trainer):
    iterators, problems = progress.compare_iterators(
        arrays, SavedParts(trainer).iterators, 2, is_replica=False)
    CheckedDeserializer(arrays, Differences(problems, ()), iterators, True).load(trainer)


class Endless(chainer.iterators.SerialIterator):
    """Has an unknown state, and no length."""

    def __init__(self, dataset, batch_size, shuffle):
        super().__init__(dataset, batch_size)
        self.secret = len(dataset)

    def serialize(self, serializer):
        self.secret = serializer('secret', self.secret)


def test_a_custom_iterator_restarts():
    arrays = saved_arrays(make_trainer(20, 2, 3, kind=Endless))
    trainer = make_trainer(10, 2, 3, kind=Endless)
    load_resized(arrays, trainer)
    assert trainer.updater.get_iterator('main').secret == 10


class OneThird(chainer.iterators.SerialIterator):
    """Takes only a third of its dataset, in the same order in each epoch."""

    def __init__(self, dataset, batch_size, shuffle):
        super().__init__(dataset, batch_size, order_sampler=lambda order, position: np.arange(
            len(dataset) // 3))


def test_an_order_sampler_that_selects_samples():
    """The fraction of the epoch is a fraction of the order, not of the dataset."""
    arrays = saved_arrays(make_trainer(60, 2, 5, kind=OneThird))  # half of 20 samples
    trainer = make_trainer(30, 2, 5, kind=OneThird)
    load_resized(arrays, trainer)
    iterator = trainer.updater.get_iterator('main')
    assert iterator.epoch_detail == 0.5 and next(iterator) == [5, 6]


def test_a_model_without_a_trainer():
    model, loaded = chainer.links.Linear(2, 2), chainer.links.Linear(2, 2)
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(model)
    load_resized(serializer.target, loaded)
    assert (loaded.W.array == model.W.array).all()
    del serializer.target['W']
    with pytest.raises(KeyError):
        load_resized(serializer.target, loaded)


@pytest.mark.parametrize('factor', [0, 0.1])
def test_residuals_of_zeros_are_no_residuals(comm, factor):
    model = chainer.links.Linear(2, 2)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(), comm, compression='2bit').setup(model)
    for _ in range(2):  # the first update broadcasts
        optimizer.update(lambda: chainer.functions.sum(model.W) * factor)
    assert resume._have_residuals(SavedParts({'optimizer': optimizer})) == bool(factor)
