"""Optimizers that prepare their exchange in the first update, which a resumed run does not repeat.

The references are closed forms: SGD with a learning rate of 1 on a linear loss subtracts the sum of
the mean gradients.
"""
import itertools

import chainer
import numpy as np
import pytest
from chainer import functions as F
from chainer.training import extensions
from each_case import each_case
from killed_jobs import make_saver, new_folder, some_of
from shared_fixtures import communicators

import chainermn

pytestmark = pytest.mark.filterwarnings('ignore:.*multi_node_snapshot:DeprecationWarning',
                                        'ignore:.*saved by . ranks:RuntimeWarning')

UPDATES, NAMES = 9, ['count', 'loss_scale', 'means', 'sums']
THRESHOLD = .5

comm = communicators('overlapping')


class Model(chainer.Chain):
    """A linear loss; its parameters have the names of what is saved beside them."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            for name in NAMES:
                setattr(self, name, chainer.Parameter(np.zeros(3)))
            self.child = chainer.Link()
            with self.child.init_scope():
                self.child.count = chainer.Parameter(np.zeros(3))

    def forward(self, gradients):
        loss = F.sum(self.child.count * gradients[-1])
        for name, gradient in zip(NAMES, gradients, strict=False):
            loss += F.sum(getattr(self, name) * gradient)
        return loss


def gradients_of(update, rank, size):
    """The mean over all ranks does not depend on their number."""
    mean = np.random.RandomState(update).randint(-8, 9, (len(NAMES) + 1, 3))
    return (mean + 2. * rank - (size - 1)) / 4


def expected(end, options, size):
    """The parameters after an update; the first one broadcasts."""
    gradients = [np.array([gradients_of(update, rank, size) for rank in range(size)])
                 for update in range(1, end)]
    if options.get('compression') == '2bit':
        residuals, sent = 0, []
        for gradient in gradients:
            residuals = residuals + gradient
            sent.append(THRESHOLD * (1. * (residuals >= THRESHOLD) - (residuals <= -THRESHOLD)))
            residuals = residuals - sent[-1]
        gradients = sent
    n = options.get('n_accumulations', 1)
    used = len(gradients) // n * n - bool(options.get('double_buffering'))
    return -sum(gradient.mean(axis=0) / n for gradient in gradients[:max(used, 0)])


def make(comm, options, scale):
    model, actual = Model(), chainer.optimizers.SGD(1)
    if scale:
        actual.loss_scaling(interval=1)  # another scale in each update
    return model, chainermn.create_multi_node_optimizer(actual, comm, **options).setup(model)


def train(comm, optimizer, model, begin, end):
    for update in range(begin, end):
        optimizer.update(model, gradients_of(update, comm.rank, comm.size))


def check(model, values):
    names = [*(getattr(model, name) for name in NAMES), model.child.count]
    np.testing.assert_allclose([param.array for param in names], values + np.zeros((5, 3)),
                               rtol=0, atol=1e-12)


OPTIONS = [
    dict(overlap='always'),
    dict(overlap='always', compression='2bit'),
    dict(overlap='always', n_accumulations=2),
    dict(n_accumulations=3),
    dict(n_accumulations=2, overlap='always', shard_states=True),
    dict(n_accumulations=2, zero_fill=False),
    dict(double_buffering=True),
    dict(double_buffering=True, shard_states=True),
]


@pytest.mark.slow
@each_case('options, at', itertools.product(OPTIONS, [1, 2, 4]))
def test_dictionary(comm, folder, options, at):
    scale = at != 2 and 'compression' not in options
    saver = chainermn.create_multi_node_checkpointer('run', comm, path=new_folder(comm, folder))
    model, optimizer = make(comm, options, scale)
    train(comm, optimizer, model, 0, at)
    saver.save({'model': model, 'optimizer': optimizer}, at)
    model, resumed = make(comm, options, scale)
    state = {'model': model, 'optimizer': resumed}
    assert saver.maybe_load(state) == at
    saver.save(state, at + 1)  # before an update
    model, resumed = make(comm, options, scale)
    assert saver.maybe_load({'model': model, 'optimizer': resumed}) == at + 1
    train(comm, resumed, model, at, UPDATES)
    saver.finalize()
    check(model, expected(UPDATES, options, comm.size))
    if 'overlap' in options and comm.size > 1:
        train(comm, optimizer, Model(), at, at)
        assert resumed.buckets == optimizer.buckets != []
        assert resumed.n_early == len(resumed.buckets)


@each_case('options, way', zip(
    [options for options in OPTIONS if 'compression' not in options],
    itertools.cycle(['fewer', 'more']), strict=False))
def test_another_number_of_ranks(comm, folder, options, way):
    path, groups = new_folder(comm, folder), [comm, some_of(comm, 1)]
    for (begin, end), group in zip([(0, 4), (4, UPDATES)], groups[::1 if way == 'fewer' else -1],
                                   strict=True):
        if group is not None:
            saver = chainermn.create_multi_node_checkpointer('run', group, path=path)
            model, optimizer = make(group, options, True)
            state = {'model': model, 'optimizer': optimizer}
            assert saver.maybe_load(state) == (begin or None)
            train(group, optimizer, model, begin, end)
            saver.save(state, end)
            saver._saver.lock.release()
        comm.barrier()
    if group is not None:
        check(model, expected(UPDATES, options, group.size))


#: A snapshot of one rank lacks what these keep on the others.
OF_THE_RANK = {'shard_states', 'n_accumulations', 'compression'}


@each_case('options, how', [
    (options, how) for options in OPTIONS for how in ('snapshot', 'checkpointer')
    if how == 'checkpointer' or not OF_THE_RANK & {*options}])
def test_trainer(comm, folder, options, how):
    """Also if all ranks load the snapshot of one."""
    folder, model = new_folder(comm, folder), None
    for end in (4, UPDATES):
        model, optimizer = make(comm, options, 'compression' not in options)
        data = [gradients_of(update, comm.rank, comm.size) for update in range(UPDATES)]
        updater = chainer.training.StandardUpdater(
            chainer.iterators.SerialIterator(data, 1, shuffle=False), optimizer,
            converter=lambda batch, device: batch[0], loss_func=model)
        trainer = chainer.training.Trainer(updater, (end, 'iteration'), out=folder)
        saver = make_saver(comm, folder, how)
        trainer.extend(saver, trigger=(4, 'iteration'))
        trainer.extend(extensions.observe_lr())
        if how == 'checkpointer':
            saver.maybe_load(trainer, optimizer)
        trainer.run()
        assert updater.iteration == end
    check(model, expected(UPDATES, options, comm.size))
