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


def make_trainer(comm, folder, shard, stop, create=chainer.optimizers.Adam, is_tied=False):
    model = chainer.Sequential(chainer.links.Linear(6, 40, initialW=1), chainer.links.Linear(
        40, 3, initialW=1))
    if is_tied:
        model[1].W.array = model[0].W.array.reshape(-1)[-120:].reshape(3, 40)
    weights = [chainer.Parameter(np.ones(p.shape, 'f')) for p in model.params()]

    def loss(x):
        """The mean gradient is an integer, divided by 64."""
        factor = float(x.sum()) * comm.size / 64
        return sum(chainer.functions.sum(p * weight) * factor
                   for p, weight in zip(model.params(), weights, strict=True))

    optimizer = chainermn.create_multi_node_optimizer(
        create(), comm, shard_states=shard).setup(model)
    iterator = chainer.iterators.SerialIterator(
        Data(comm), GLOBAL_BATCH // comm.size,
        order_sampler=lambda order, position: np.arange(len(order)))
    updater = chainer.training.StandardUpdater(
        iterator, optimizer, loss_func=loss,
        converter=lambda batch, device: np.array(batch))
    return chainer.training.Trainer(updater, (stop, 'iteration'), out=folder), optimizer


def checkpointer_of(comm):
    return chainermn.create_multi_node_checkpointer('run', comm)


def parameters(trainer):
    model = trainer.updater.get_optimizer('main').target
    return [param.array.copy() for _, param in sorted(model.namedparams())]


def save(comm, folder, shard, **options):
    """Trains for some steps and saves; returns the parameters after twice as many steps."""
    trainer, _ = make_trainer(comm, folder, shard, STEPS, **options)
    trainer.run()
    checkpoint(comm, trainer, folder)
    trainer.stop_trigger = chainer.training.get_trigger((2 * STEPS, 'iteration'))
    while trainer.updater.iteration < 2 * STEPS:
        trainer.updater.update()
    return parameters(trainer)


def checkpoint(comm, trainer, folder):
    checkpointer = chainermn.create_multi_node_checkpointer('run', comm, path=folder)
    checkpointer.save(trainer, STEPS)
    checkpointer._saver.lock.release()


def resume(comm, folder, shard, **options):
    trainer, optimizer = make_trainer(comm, folder, shard, 2 * STEPS, **options)
    checkpointer_of(comm).maybe_load(trainer, optimizer, path=folder)
    assert trainer.updater.iteration == STEPS
    trainer.run()
    return parameters(trainer)


def assert_equal(comm, found, expected):
    """On all ranks, or the others would wait for one that failed."""
    equal = [a.tobytes() == b.tobytes() for a, b in zip(found, expected, strict=True)]
    assert comm.allgather_obj(equal) == [[True] * len(expected)] * comm.size


@pytest.mark.parametrize('before, after, create', [
    (True, True, chainer.optimizers.MSVAG), (True, False, chainer.optimizers.MSVAG),
    (False, True, chainer.optimizers.Adam)], ids=[
        'sharded', 'sharded to complete', 'complete to sharded'])
@pytest.mark.filterwarnings('ignore:iteration 4 was saved by')
def test_any_number_of_ranks_continues_with_the_same_bits(comm, folder, before, after, create):
    expected = save(comm, folder, before, create=create)
    for n in range(1, comm.size + 1):
        part = some_of(comm, n)
        if part is not None:
            found = resume(part, folder, after, create=create)
        assert_equal(comm, expected if part is None else found, expected)


@pytest.mark.parametrize('after', [True, False], ids=['sharded', 'complete'])
def test_parameters_that_share_memory(comm, folder, after):
    expected = save(comm, folder, True, is_tied=True)
    untied = save(comm, folder + '-untied', True)
    assert any((a != b).any() for a, b in zip(expected, untied, strict=True))
    assert_equal(comm, resume(comm, folder, after, is_tied=True), expected)


@pytest.mark.mpi(min_size=2)
@pytest.mark.filterwarnings('ignore:iteration 4 was saved by')
def test_more_ranks(comm, folder):
    few = some_of(comm, comm.size - 1)
    expected = comm.bcast_obj(None if few is None else save(few, folder, True))
    assert_equal(comm, resume(comm, folder, True), expected)


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


@pytest.mark.parametrize('shard', [True, False])
def test_a_checkpoint_before_the_first_update(comm, folder, shard):
    """Neither the program nor the file has states, and the ranks have different parameters."""
    results = []
    for seed in range(2):
        trainer, optimizer = make_trainer(comm, folder, shard, STEPS)
        for param in optimizer.target.params():
            param.array[...] = np.random.RandomState([seed, comm.rank]).rand(*param.shape)
        checkpointer = chainermn.create_multi_node_checkpointer('run', comm, path=folder)
        parts = {'model': optimizer.target, 'optimizer': optimizer}
        assert checkpointer.maybe_load(parts) == (0 if results else None)
        if not results:
            checkpointer.save(parts, 0)
        checkpointer._saver.lock.release()
        trainer.run()
        comm.check_replicas(optimizer.target)
        results.append(parameters(trainer))
    assert_equal(comm, *results)
