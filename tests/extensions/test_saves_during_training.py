"""A save has the state of its iteration, though states are copied while the training continues."""
import threading

import chainer
import numpy as np
import pytest
from chainer import functions as F
from chainer.training import extensions
from each_case import each_case
from killed_jobs import new_folder
from shared_fixtures import communicators

import chainermn
from chainer_compat import updates
from chainermn.extensions._checkpointing.late_copies import LateCopies

CASES = [('Adam', {}), ('MomentumSGD', {}), ('Adam', dict(overlap='always')),
         ('Adam', dict(shard_states=True)), ('MomentumSGD', dict(n_accumulations=2)),
         ('Adam', dict(double_buffering=True)),
         ('MomentumSGD', dict(overlap='always', compression='2bit'))]

comm = communicators('overlapping')


@pytest.fixture
def slow_thread(monkeypatch):
    """The thread copies nothing before the event is set; return it and how many copies it saw."""
    may_copy, counts = threading.Event(), []
    finish = LateCopies.finish

    def wait(late):
        if threading.current_thread() is threading.main_thread():
            counts.append(len(late._parts))
        else:
            may_copy.wait()
        finish(late)

    monkeypatch.setattr(LateCopies, 'finish', wait)
    yield may_copy, counts
    may_copy.set()


class Model(chainer.Chain):
    """With running means, which change in each forward."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.linear = chainer.links.Linear(5, 6)
            self.bn = chainer.links.BatchNormalization(6)

    def forward(self, x):
        return F.mean((self.bn(self.linear(x)) - 1) ** 2)


def make(comm, name, options):
    np.random.seed(0)  # of the initial weights
    model = Model()
    optimizer = getattr(chainer.optimizers, name)(.1)
    return model, chainermn.create_multi_node_optimizer(optimizer, comm, **options).setup(model)


def train(comm, model, optimizer, start, stop):
    for n in range(start, stop):
        x = np.random.RandomState(n * comm.size + comm.rank).normal(0, 1, (4, 5))
        optimizer.update(model, x.astype('f'))


def state_of(target):
    serializer = chainer.serializers.DictionarySerializer()
    for name, part in target.items():
        part.serialize(serializer[name])
    return {name: np.array(value) for name, value in serializer.target.items()}


def check_equal(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        np.testing.assert_array_equal(value, b[name], name)


@each_case('name, options', CASES)
def test_the_training_is_ahead_of_the_thread(comm, folder, slow_thread, name, options):
    may_copy, counts = slow_thread
    counts.clear()
    may_copy.clear()
    path = new_folder(comm, folder)
    saver = chainermn.create_multi_node_checkpointer('run', comm, path=path)
    model, optimizer = make(comm, name, options)
    train(comm, model, optimizer, 0, 5)
    target = {'model': model, 'optimizer': optimizer}
    expected = state_of(target)
    saver.save(target, 5, wait=False)
    train(comm, model, optimizer, 5, 8)
    assert sum(comm.allgather_obj(sum(counts))) > 0  # the training made copies itself
    may_copy.set()
    end = state_of(target)
    resumed, other = make(comm, name, options)
    target = {'model': resumed, 'optimizer': other}
    assert saver.maybe_load(target) == 5
    if 'shard_states' not in options:  # which are only cut in the next update
        check_equal(state_of(target), expected)
    train(comm, resumed, other, 5, 8)
    check_equal(state_of(target), end)
    saver.finalize()


def test_a_snapshot_in_a_trainer(comm, folder, slow_thread):
    may_copy, counts = slow_thread

    def make_trainer(stop):
        _, optimizer = make(comm, 'Adam', {})
        data = np.random.RandomState(comm.rank).normal(0, 1, (9, 5)).astype('f')
        iterator = chainer.iterators.SerialIterator(data, 3, shuffle=False)
        updater = chainer.training.StandardUpdater(iterator, optimizer)
        return chainer.training.Trainer(updater, (stop, 'iteration'), folder)

    trainer = make_trainer(5)
    trainer.run()
    expected = state_of({'updater': trainer.updater})
    trainer = make_trainer(8)
    trainer.extend(chainermn.extensions.multi_node_snapshot(
        comm, extensions.snapshot(), [[rank] for rank in range(comm.size)]),
        trigger=(5, 'iteration'))
    trainer.extend(lambda trainer: may_copy.set(), name='opens', trigger=(7, 'iteration'))
    trainer.run()
    assert sum(comm.allgather_obj(sum(counts))) > 0  # the training made copies itself
    trainer = make_trainer(8)
    trainer.extend(extensions.snapshot())
    chainer.serializers.load_npz(f'{folder}/snapshot_iter_5.{comm.rank}', trainer, strict=False)
    found = state_of({'updater': trainer.updater})
    del found['updater/optimizer:main/chainermn/is_new']  # the next update broadcasts
    check_equal(found, expected)


@each_case('name, use_torch', [('Adam', 'auto'), ('Adam', 'never'), ('RMSprop', 'auto')])
def test_an_update_by_a_plan_waits_for_large_states(comm, folder, slow_thread, name, use_torch,
                                                    monkeypatch):
    """A plan finds states without the attribute of the rule, and changes them in place."""
    may_copy, counts = slow_thread
    may_copy.clear()
    counts.clear()
    path = new_folder(comm, folder)
    saver = chainermn.create_multi_node_checkpointer('run', comm, path=path)
    optimizer = getattr(chainer.optimizers, name)().setup(chainer.links.Linear(300, 200))
    planned = []
    original = updates.update_as_before

    def update(step):
        for param in optimizer.target.params():
            param.grad = np.random.RandomState(step).normal(0, 1, param.shape).astype('f')
        optimizer.update()

    def spy(*args):
        found = original(*args)
        if found:
            planned.append(found)
        return found

    with monkeypatch.context() as patch, chainer.using_config('use_torch', use_torch):
        patch.setattr(updates, 'update_as_before', spy)
        for step in range(3):
            update(step)
        target = {'model': optimizer.target, 'optimizer': optimizer}
        expected = state_of(target)
        saver.save(target, 3, wait=False)
        update(3)
    assert len(planned) == 3  # all but the first update
    assert counts[0] > 0  # the update made the copies itself
    may_copy.set()
    other = getattr(chainer.optimizers, name)().setup(chainer.links.Linear(300, 200))
    target = {'model': other.target, 'optimizer': other}
    assert saver.maybe_load(target) == 3
    check_equal(state_of(target), expected)
    saver.finalize()
