"""Checkpoints of sharded optimizer states: loaded on any number of ranks, with shards or without.

The data of a step are the same for any number of ranks that divides the batch, and all sums are
exact, so the number of ranks changes no bit.
"""
import contextlib

import chainer
import numpy as np
import pytest
from killed_jobs import some_of
from shared_fixtures import raises_on_all

import chainermn
from chainermn.extensions import multi_node_snapshot

# create_multi_node_checkpointer
pytestmark = pytest.mark.filterwarnings('ignore:.*multi_node_snapshot:DeprecationWarning')

GLOBAL_BATCH, STEPS = 12, 4


class Data:
    """Small integers."""

    def __init__(self, comm):
        self.comm = comm

    def __len__(self):
        return GLOBAL_BATCH // self.comm.size * STEPS * 4

    def __getitem__(self, i):
        n = GLOBAL_BATCH // self.comm.size
        random = np.random.RandomState(i // n * GLOBAL_BATCH + self.comm.rank * n + i % n)
        return random.randint(-4, 5, 6).astype('f')


def make_trainer(comm, folder, shard, stop):
    model = chainer.Sequential(chainer.links.Linear(6, 40, initialW=1), chainer.links.Linear(
        40, 3, initialW=1))
    weights = [chainer.Parameter(np.ones(p.shape, 'f')) for p in model.params()]

    def loss(x):
        """The mean gradient is an integer, divided by 64."""
        factor = float(x.sum()) * comm.size / 64
        return sum(chainer.functions.sum(p * weight) * factor
                   for p, weight in zip(model.params(), weights, strict=True))

    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.Adam(), comm, shard_states=shard).setup(model)
    iterator = chainer.iterators.SerialIterator(
        Data(comm), GLOBAL_BATCH // comm.size,
        order_sampler=lambda order, position: np.arange(len(order)))
    updater = chainer.training.StandardUpdater(
        iterator, optimizer, loss_func=loss,
        converter=lambda batch, device: np.array(batch))
    return chainer.training.Trainer(updater, (stop, 'iteration'), out=folder), optimizer


def parameters(trainer):
    model = trainer.updater.get_optimizer('main').target
    return [param.array.copy() for _, param in sorted(model.namedparams())]


def assert_equal(comm, found, expected):
    """On all ranks, or the others would wait for one that failed."""
    equal = [a.tobytes() == b.tobytes() for a, b in zip(found, expected, strict=True)]
    assert comm.allgather_obj(equal) == [[True] * len(expected)] * comm.size


# --- multi_node_snapshot -------------------------------------------------------------------------

def snapshot_trainer(comm, folder, sets, stop):
    trainer, optimizer = make_trainer(comm, folder, True, stop)
    snapshot = chainer.training.extensions.snapshot(autoload=True)
    trainer.extend(multi_node_snapshot(comm, snapshot, sets), trigger=(STEPS, 'iteration'))
    return trainer, optimizer


@pytest.mark.mpi(min_size=2)
def test_one_file_for_several_ranks_is_an_error(comm, folder):
    trainer, _ = snapshot_trainer(comm, folder, [], STEPS)
    with raises_on_all(ValueError, match='replica sets of one rank each'):
        trainer.run()


@pytest.mark.filterwarnings('ignore:iteration 4 was saved by')
def test_a_file_for_each_rank(comm, folder):
    def sets(comm):
        return [[rank] for rank in range(comm.size)]

    trainer, _ = snapshot_trainer(comm, folder, sets(comm), STEPS)
    trainer.run()
    trainer.stop_trigger = chainer.training.get_trigger((2 * STEPS, 'iteration'))
    while trainer.updater.iteration < 2 * STEPS:
        trainer.updater.update()
    expected = parameters(trainer)
    comm.barrier()
    for n in range(1, comm.size + 1):
        part = some_of(comm, n)
        if part is not None:
            trainer, optimizer = snapshot_trainer(part, folder, sets(part), 2 * STEPS)
            extension = next(iter(trainer._extensions.values())).extension
            extension.initialize(trainer)
            optimizer.is_changed(optimizer.target)
            assert trainer.updater.iteration == STEPS
            while trainer.updater.iteration < 2 * STEPS:
                trainer.updater.update()
            with contextlib.suppress(RuntimeError):
                extension._saver.lock.release()
        assert_equal(comm, expected if part is None else parameters(trainer), expected)
