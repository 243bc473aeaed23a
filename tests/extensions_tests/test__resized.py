"""What a rank takes from the file of another, whose data set had another length."""
import chainer
import numpy as np
import pytest

from chainermn.extensions._resized import Resized


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


def state(trainer):
    trainer.run()
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(trainer)
    return serializer.target


@pytest.mark.parametrize('shuffle', [None, False])
@pytest.mark.parametrize('length', [12, 5, 40])
def test_iterators_go_on_in_the_same_part_of_the_epoch(shuffle, length):
    saved = make_trainer(20, 2, 16, shuffle)  # 1.6 epochs
    arrays = state(saved)
    trainer = make_trainer(length, 2, 17, shuffle)
    order = trainer.updater.get_iterator('main')._state.order
    Resized(arrays, trainer).load(trainer)
    iterator = trainer.updater.get_iterator('main')
    assert trainer.updater.iteration == 16 and iterator.epoch == 1
    part = 0.6 if shuffle is None else 0.5  # without an order, that before the last batch
    assert iterator.current_position == int((part + 1e-9) * length)
    assert iterator._state.order is order
    assert iterator.previous_epoch_detail == pytest.approx(iterator.epoch_detail)
    model, before = (t.updater.get_optimizer('main').target for t in (trainer, saved))
    assert (model.W.array == before.W.array).all()
    trainer.run()
    assert trainer.updater.iteration == 17 and trainer.get_extension('Counts').count == 17


def test_extensions_that_the_file_lacks_stay_as_they_are():
    arrays = state(make_trainer(20, 2, 3, name='a'))
    trainer = make_trainer(10, 2, 3, name='b')
    Resized(arrays, trainer).load(trainer)
    assert trainer.updater.iteration == 3 and trainer.get_extension('b').count == 0


class Endless(chainer.iterators.SerialIterator):
    """Has a state that nobody knows, and no length."""

    def __init__(self, dataset, batch_size, shuffle):
        super().__init__(dataset, batch_size)
        self.secret = len(dataset)

    def serialize(self, serializer):
        self.secret = serializer('secret', self.secret)


def test_an_iterator_of_ones_own_begins_anew():
    arrays = state(make_trainer(20, 2, 3, kind=Endless))
    trainer = make_trainer(10, 2, 3, kind=Endless)
    Resized(arrays, trainer).load(trainer)
    assert trainer.updater.get_iterator('main').secret == 10


def test_a_model_without_a_trainer():
    model, loaded = chainer.links.Linear(2, 2), chainer.links.Linear(2, 2)
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(model)
    Resized(serializer.target, loaded).load(loaded)
    assert (loaded.W.array == model.W.array).all()
    del serializer.target['W']
    with pytest.raises(KeyError):
        Resized(serializer.target, loaded).load(loaded)
