"""Checkpoints between the updates of a step (``n_accumulations``): none of their gradients is lost.

The reference is a closed form: SGD with a learning rate of 1 on a linear loss subtracts the mean
gradient of all examples of the updates of a step. It does not depend on the number of ranks.
The laws of states combine accumulation with other options and numbers of ranks.
"""
import os
import warnings

import chainer
import numpy as np
import pytest
from chainer import functions as F
from shared_fixtures import communicators

import chainermn

EXAMPLES, UPDATES = 12, 7  # of an update, and of a run after the first one, which broadcasts

comm = communicators('flat')


class Linear(chainer.Link):
    """The gradients are the examples; ``scalar`` is only used by even updates."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.vector = chainer.Parameter(np.zeros(300))
            self.scalar = chainer.Parameter(np.zeros(()))
            self.shared = chainer.Parameter(np.zeros(3))
            self.same = self.shared  # Chainer's optimizers step once for each path
            self.half = chainer.Parameter(np.zeros(2, np.float16))

    def forward(self, update, examples):
        gradient = examples.mean(axis=0)
        loss = F.sum(self.vector * gradient) + F.sum(F.cast(self.half, np.float64) * gradient[:2])
        loss += F.sum(self.shared * gradient[:3])
        return loss if update % 2 else loss + self.scalar * gradient[0]


def examples_of(update):
    return np.random.RandomState(update).randint(-8, 9, (EXAMPLES, 300)).astype(np.float64)


def expected(n_accumulations):
    vector, scalar = np.zeros(300), 0.
    for update in range(UPDATES // n_accumulations * n_accumulations):
        gradient = examples_of(update).mean(axis=0) / n_accumulations
        vector -= gradient
        scalar -= 0 if update % 2 else gradient[0]
    return vector, scalar


def make(comm, n_accumulations):
    model = Linear()
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(1.), comm, n_accumulations=n_accumulations).setup(model)
    return model, optimizer


def train(comm, model, optimizer, begin, end):
    n = EXAMPLES // comm.size
    for update in range(begin, end):
        optimizer.update(model, update, examples_of(update)[n * comm.rank:n * (comm.rank + 1)])


def check(model, n_accumulations):
    vector, scalar = expected(n_accumulations)
    np.testing.assert_allclose(model.vector.array, vector, atol=1e-12)
    np.testing.assert_allclose(model.scalar.array, scalar, atol=1e-12)
    np.testing.assert_allclose(model.shared.array, 2 * vector[:3], atol=1e-12)
    np.testing.assert_allclose(model.half.array, vector[:2], atol=0.02)


@pytest.mark.parametrize('is_shared', [False, True])
def test_multi_node_snapshot(comm, folder, is_shared):
    """Ranks that share a file are warned; with a file for each rank nothing is lost."""
    sets = [range(comm.size)] if is_shared else [[rank] for rank in range(comm.size)]
    for stop in 3, UPDATES + 1:
        model, optimizer = make(comm, 3)
        updater = chainer.training.updaters.StandardUpdater(
            chainer.iterators.SerialIterator(range(-1, UPDATES), 1, shuffle=False), optimizer,
            converter=lambda batch, device: batch[0],
            loss_func=lambda update, model=model, n=EXAMPLES // comm.size: model(
                update, examples_of(max(update, 0))[n * comm.rank:n * (comm.rank + 1)]))
        trainer = chainer.training.Trainer(updater, (stop, 'iteration'), out=folder)
        trainer.extend(chainermn.extensions.multi_node_snapshot(
            comm, chainer.training.extensions.snapshot(autoload=True), sets),
            trigger=(3, 'iteration'))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            trainer.run()
        is_warned = any('continue with the gradients that one rank accumulated' in str(each.message)
                        for each in caught)
        assert is_warned == (is_shared and stop > 3 and comm.rank == 0 < comm.size - 1)
    if not is_shared:
        check(model, 3)


def test_a_snapshot_of_one_rank_has_its_accumulated_gradients(comm, folder):
    path = os.path.join(folder, 'snapshot')
    model, optimizer = make(comm, 2)
    optimizer.update(model, 0, np.ones((1, 300)))  # broadcasts
    optimizer.update(model, 0, np.full((1, 300), comm.rank + 1.))
    if comm.rank == 0:
        chainer.serializers.save_npz(path, optimizer)
    comm.barrier()
    model, optimizer = make(comm, 2)
    chainer.serializers.load_npz(path, optimizer)
    optimizer.update(model, 0, np.ones((1, 300)))  # broadcasts
    optimizer.update(model, 0, np.full((1, 300), 3.))
    np.testing.assert_array_equal(model.vector.array, np.full(300, -(1. + 3.) / 2))
