"""The parts of a trainer, of another object, and of a dictionary of objects."""
import chainer
import numpy as np
import pytest

from chainermn.extensions._checkpointing import state
from chainermn.extensions._checkpointing.parts import SavedParts

pytestmark = pytest.mark.mpi_skip


def make_trainer():
    model = chainer.Sequential(chainer.links.Linear(2, 2), chainer.links.BatchNormalization(2))
    iterator = chainer.iterators.SerialIterator(range(9), 1)
    return chainer.training.Trainer(chainer.training.StandardUpdater(
        iterator, chainer.optimizers.SGD().setup(model)))


def test_parts_of_a_trainer_and_of_a_dictionary():
    trainer = make_trainer()
    optimizer = trainer.updater.get_optimizer('main')
    iterator, model = trainer.updater.get_iterator('main'), optimizer.target
    for target, trainers, iterators, models, optimizers in [
            (trainer, [''], ['updater/iterator:main/'], ['updater/model:main/'],
             ['updater/optimizer:main/']),
            (model, [], [], [''], []),
            ({'a': iterator, 'b': optimizer, 'c': model}, [], ['a/'], ['c/'], ['b/']),
            ({'t': trainer}, ['t/'], ['t/updater/iterator:main/'], ['t/updater/model:main/'],
             ['t/updater/optimizer:main/'])]:
        parts = SavedParts(target)
        assert parts.trainers == dict.fromkeys(trainers, trainer)
        assert parts.iterators == dict.fromkeys(iterators, iterator)
        assert parts.models == dict.fromkeys(models, model)
        assert parts.all == {
            **parts.iterators, **parts.models, **dict.fromkeys(optimizers, optimizer)}


def test_buffers_and_arrays_of_one_rank():
    trainer = make_trainer()
    parts = SavedParts(trainer)
    keys = [f'updater/{key}' for key in state.copy_state(trainer.updater)]
    assert parts.buffers(keys) == {
        f'updater/model:main/1/{name}' for name in ('avg_mean', 'avg_var', 'N')}
    assert parts.of_one_rank(keys) == {
        key for key in keys if key.startswith('updater/iterator:main/')} != set()
    assert SavedParts({'a': 3}).buffers(['a/W']) == set()


@pytest.mark.parametrize('target, text', [
    ({'epoch': 3}, "'epoch' is of type int, which Chainer cannot serialize"),
    ({'a': np.zeros(2)}, "'a' is of type ndarray, which"),
    ({1: chainer.links.Linear(1, 1)}, 'the keys of a state must be strings, not 1')])
def test_parts_that_cannot_be_serialized(target, text):
    with pytest.raises(TypeError, match=text):
        state.copy_state(SavedParts(target).whole)
