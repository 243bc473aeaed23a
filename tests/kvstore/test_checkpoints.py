"""Checkpoints of optimizers that train through a store."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import optimizers
from chainer.training import StandardUpdater, Trainer

import chainermn
from chainermn.kvstore import create_kvstore_optimizer

OPTIMIZERS = {'Adam': lambda: optimizers.Adam(.05),
              'MomentumSGD': lambda: optimizers.MomentumSGD(.05)}


class Lazy(chainer.Chain):
    """A model with a parameter that has two paths, and lazily initialized parameters."""

    def __init__(self, rank):
        super().__init__()
        start = np.random.RandomState(rank).randn(3, 5).astype('f')  # differs between ranks
        with self.init_scope():
            self.l1 = L.Linear(None, 3, initialW=start)
            self.l2 = L.Linear(3, 3, initialW=.1)
            self.l3 = self.l2
            self.frozen = chainer.Parameter(np.ones(2, 'f'))

    def forward(self, x):
        return F.mean(self.l3(F.tanh(self.l2(self.l1(x)))) ** 2) + F.sum(self.frozen ** 2)


class Job:
    """A process of each rank."""

    def __init__(self, comm, kv, make, on, is_frozen=False):
        self.comm, self.kv, self.model = comm, kv, Lazy(comm.rank)
        self.optimizer = create_kvstore_optimizer(make(), kv, on).setup(self.model)
        self.model.frozen.update_rule.enabled = not is_frozen

    def train(self, steps):
        for step in steps:
            x = np.random.RandomState([step, self.comm.rank]).randn(4, 5).astype('f')
            self.optimizer.update(self.model, x)
        return self

    @property
    def state(self):
        return {'model': self.model, 'optimizer': self.optimizer}

    def check(self, other):
        assert self.optimizer.t == other.optimizer.t
        for (path, found), (_, expected) in zip(
                sorted(self.model.namedparams()), sorted(other.model.namedparams()), strict=True):
            np.testing.assert_array_equal(found.array, expected.array, path)
            assert found.update_rule.t == expected.update_rule.t, path


def save(comm, path, state, at):
    saver = chainermn.create_multi_node_checkpointer('run', comm, path=path)
    saver.save(state, at)
    saver._saver.lock.release()


def load(comm, path, job):
    saver = chainermn.create_multi_node_checkpointer('run', comm, path=path)
    at = saver.maybe_load(job.state)
    saver._saver.lock.release()
    return at


@pytest.mark.parametrize('on', [True, False])
@pytest.mark.parametrize('make', OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize('options', [{}, {'bigarray_bound': 2}], ids=['whole', 'split'])
@pytest.mark.parametrize('at', [0, 1, 5])
def test_resume(create, comm, path, make, on, options, at):
    """It gives the same bits as a run that was not interrupted, at any time."""
    expected = Job(comm, create('dist_sync', **options), make, on, at == 5).train(range(9))
    saved = Job(comm, create('dist_sync', **options), make, on, at == 5).train(range(at))
    save(comm, path, saved.state, at)
    resumed = Job(comm, create('dist_sync', **options), make, on, at == 5)
    assert load(comm, path, resumed) == at
    save(comm, path, resumed.state, at + 1)  # before an update
    again = Job(comm, create('dist_sync', **options), make, on, at == 5)
    assert load(comm, path, again) == at + 1
    for job in resumed, again:
        job.train(range(at, 9)).check(expected)


@pytest.mark.parametrize('on', [True, False])
def test_a_trainer(create, comm, path, on):
    """The first update after loading changes the parameters."""
    def run(n, resumes=False):
        job = Job(comm, create('dist_sync'), OPTIMIZERS['Adam'], on)
        x = np.random.RandomState(comm.rank).randn(20, 5).astype('f')
        trainer = Trainer(StandardUpdater(chainer.iterators.SerialIterator(x, 4), job.optimizer),
                          (n, 'iteration'), out=path)
        saver = chainermn.create_multi_node_checkpointer('run', comm)
        if resumes:
            assert saver.maybe_load(trainer, job.optimizer) == 6
        if n == 6:
            trainer.extend(saver, trigger=(3, 'iteration'))
            saver.finalize = saver._saver.flush
        trainer.run()
        saver._saver.lock.release()
        return job

    np.random.seed(1)
    expected = run(11)
    np.random.seed(1)
    run(6)
    run(11, resumes=True).check(expected)


@pytest.mark.parametrize('options', [{}, {'bigarray_bound': 2}], ids=['whole', 'split'])
@pytest.mark.parametrize('before, after', [(True, True), (False, True), (True, False)])
def test_another_store(create, comm, path, options, before, after):
    """The states may be split differently, or be those of the actual optimizer."""
    make = OPTIMIZERS['Adam']
    expected = Job(comm, create('dist_sync'), make, after).train(range(4))
    saved = Job(comm, create('dist_sync'), make, before).train(range(4))
    save(comm, path, saved.state, 4)
    resumed = Job(comm, create('dist_sync', **options), make, after)
    load(comm, path, resumed)
    for job in resumed, expected:
        job.train(range(4, 7))
    for (_, found), (_, param) in zip(sorted(resumed.model.namedparams()),
                                      sorted(expected.model.namedparams()), strict=True):
        np.testing.assert_allclose(found.array, param.array, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings('ignore:iteration .* was saved by')
@pytest.mark.parametrize('on', [True, False])
def test_another_number_of_ranks(create, comm, path, on):
    """All ranks load the states that rank 0 saved alone, and rank 0 loads those of all ranks."""
    alone = comm.split(comm.rank, 0)
    make = OPTIMIZERS['Adam']
    saved = Job(comm, create('dist_sync', bigarray_bound=6), make, on).train(range(4))
    save(comm, path, saved.state, 4)
    if comm.rank == 0:
        one = Job(alone, chainermn.kvstore.create('dist_sync', alone), make, on)
        load(alone, path, one)
        save(alone, path + '1', one.state, 4)
        assert one.optimizer.t == 3
    comm.barrier()
    resumed = Job(comm, create('dist_sync', bigarray_bound=6), make, on)
    load(comm, path + '1', resumed)
    resumed.train(range(4, 7)).check(saved.train(range(4, 7)))
    alone.finalize()


@pytest.mark.parametrize('on', [True, False])
def test_loading_after_updates(create, comm, path, on):
    """A store gets the loaded parameters and states."""
    make = OPTIMIZERS['MomentumSGD']
    expected = Job(comm, create('dist_sync'), make, on).train(range(4))
    save(comm, path, expected.state, 4)
    other = Job(comm, create('dist_sync'), make, on).train(range(10, 13))
    load(comm, path, other)
    other.train(range(4, 7)).check(expected.train(range(4, 7)))


@pytest.mark.parametrize('on', [True, False])
def test_residuals_of_compression(create, comm, path, on):
    def start():
        kv = create('dist_sync')
        kv.set_gradient_compression({'type': '2bit', 'threshold': .1})
        return Job(comm, kv, OPTIMIZERS['MomentumSGD'], on)

    expected = start().train(range(4))
    save(comm, path, expected.state, 4)
    resumed = start()
    load(comm, path, resumed)
    resumed.train(range(4, 8)).check(expected.train(range(4, 8)))


def test_dist_async(create, comm, path, monkeypatch):
    """Each rank restores the states of its shards."""
    make = OPTIMIZERS['MomentumSGD']
    saved = Job(comm, create('dist_async'), make, True).train(range(3))
    comm.barrier()
    save(comm, path, saved.state, 3)
    resumed = Job(comm, create('dist_async'), make, True)
    load(comm, path, resumed)
    assert resumed.optimizer.t == 2
    monkeypatch.setattr(type(resumed.optimizer), '_step', lambda self, parameters: None)
    resumed.train([3])
    found, expected = (job.kv._backend.server.optimizer_states() for job in (resumed, saved))
    assert found.keys() == expected.keys() != set()
    for key, state in expected.items():
        assert found[key]['t'] == state['t'] > 0
        np.testing.assert_array_equal(found[key]['v'], state['v'])
    with pytest.raises(RuntimeError, match='before the first update'):
        load(comm, path, resumed)


def test_only_the_file_of_rank_0(create, comm, path, same_error):
    job = Job(comm, create('dist_sync'), OPTIMIZERS['Adam'], True).train(range(3))
    if comm.rank == 0:
        chainer.serializers.save_npz(path + 'o', job.optimizer)
        chainer.serializers.save_npz(path + 'm', job.model)
    job.kv.save_optimizer_states(path + 's')
    other = Job(comm, create('dist_sync'), OPTIMIZERS['Adam'], True)
    chainer.serializers.load_npz(path + 'o', other.optimizer)
    chainer.serializers.load_npz(path + 'm', other.model)
    if comm.size > 1:
        error = same_error(other.optimizer.update, other.model, np.ones((1, 5), 'f'))
        assert 'create_multi_node_checkpointer' in str(error)
    # load_optimizer_states replaces these states:
    other = Job(comm, create('dist_sync'), OPTIMIZERS['Adam'], True)
    chainer.serializers.load_npz(path + 'o', other.optimizer)
    chainer.serializers.load_npz(path + 'm', other.model)
    other.kv.load_optimizer_states(path + 's')
    other.optimizer.update(other.model, np.ones((1, 5), 'f'))  # copies
    other.train(range(3, 5)).check(job.train(range(3, 5)))


def test_optimizer_states_have_the_number_of_updates(create, comm, path):
    job = Job(comm, create('dist_sync'), OPTIMIZERS['Adam'], True).train(range(6))
    job.kv.save_optimizer_states(path)
    other = Job(comm, create('dist_sync'), OPTIMIZERS['Adam'], True).train(range(2))
    other.kv.load_optimizer_states(path)
    assert other.optimizer.t == 5
    assert other.model.l1.W.update_rule.t == 5 and other.model.l2.W.update_rule.t == 10


def test_an_updater_that_was_replaced(create, comm, path):
    job = Job(comm, create('dist_sync'), OPTIMIZERS['Adam'], True).train(range(2))
    job.kv.set_updater(lambda key, pushed, stored: None)
    with pytest.warns(RuntimeWarning, match='the updater of the store was replaced'):
        chainer.serializers.save_npz(f'{path}{comm.rank}', job.optimizer)


def test_a_snapshot_of_several_ranks(create, comm, path, same_error):
    for on in True, False:
        job = Job(comm, create('dist_sync'), OPTIMIZERS['Adam'], on)
        x = np.ones((4, 5), 'f')
        trainer = Trainer(StandardUpdater(chainer.iterators.SerialIterator(x, 4), job.optimizer),
                          (2, 'iteration'), out=path)
        snapshot = chainermn.extensions.multi_node_snapshot(
            comm, chainer.training.extensions.snapshot())
        if on and comm.size > 1:
            assert 'update_on_kvstore=True' in str(same_error(snapshot.initialize, trainer))
        else:
            snapshot.initialize(trainer)
            snapshot.finalize()
