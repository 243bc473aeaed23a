"""One snapshot for each set of replicas, and resuming where all sets can."""
import os
import warnings

import chainer
import numpy as np
import pytest
from chainer.training import extensions

import chainermn
from chainermn.extensions import multi_node_snapshot
from chainermn.extensions._multi_node_snapshot import _parse_replica_sets


@pytest.fixture(scope='module')
def comm():
    return chainermn.create_communicator('naive')


@pytest.fixture
def folder(comm, tmp_path):
    return comm.bcast_obj(str(tmp_path))


def make_trainer(comm, folder, seed, stop=(6, 'iteration')):
    model = chainer.links.Classifier(chainer.links.Linear(
        2, 2, initialW=np.random.RandomState(seed).normal(0, 1, (2, 2)).astype(np.float32)))
    optimizer = chainer.optimizers.MomentumSGD(0.1).setup(model)
    data = [(np.full(2, i, np.float32), np.int32(i % 2)) for i in range(4)]
    iterator = chainer.iterators.SerialIterator(data, 2, shuffle=False)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    return chainer.training.Trainer(updater, stop, out=folder)


def weights(trainer):
    return trainer.updater.get_optimizer('main').target.predictor.W.array.copy()


def leaders(sets, size):
    return [min(ranks) for ranks in _parse_replica_sets(sets, size)]


SETS = [[], [[0]], 'each']


@pytest.fixture(params=SETS, ids=str)
def sets(request, comm):
    return [[rank] for rank in range(comm.size)] if request.param == 'each' else request.param


def run_with_snapshots(comm, folder, sets, seed, **kwargs):
    trainer = make_trainer(comm, folder, seed)
    snapshot = multi_node_snapshot(comm, extensions.snapshot(**kwargs), sets)
    trainer.extend(snapshot, trigger=(2, 'iteration'))
    trainer.run()
    comm.barrier()
    return trainer


def test_the_first_rank_of_each_set_writes(comm, folder, sets):
    run_with_snapshots(comm, folder, sets, 0)
    assert sorted(os.listdir(folder)) == sorted(
        f'snapshot_iter_{i}.{rank}' for rank in leaders(sets, comm.size) for i in (2, 4, 6))


def test_n_retains_counts_each_set_apart(comm, folder, sets):
    run_with_snapshots(comm, folder, sets, 0, n_retains=2)
    assert sorted(os.listdir(folder)) == sorted(
        f'snapshot_iter_{i}.{rank}' for rank in leaders(sets, comm.size) for i in (4, 6))


def resume(comm, folder, sets, seed=1234):
    trainer = make_trainer(comm, folder, seed, stop=lambda trainer: True)
    snapshot = multi_node_snapshot(comm, extensions.snapshot(autoload=True), sets)
    trainer.extend(snapshot, trigger=(1000, 'iteration'))
    trainer.run()
    return trainer


def test_autoload_gives_each_rank_the_state_of_its_set(comm, folder, sets):
    groups = _parse_replica_sets(sets, comm.size)
    seed = next(i for i, ranks in enumerate(groups) if comm.rank in ranks)
    expected = weights(run_with_snapshots(comm, folder, sets, seed))
    trainer = resume(comm, folder, sets)
    assert trainer.updater.iteration == 6
    np.testing.assert_array_equal(weights(trainer), expected)


def test_resumes_at_the_newest_iteration_that_all_sets_hold(comm, folder, sets):
    run_with_snapshots(comm, folder, sets, 0)
    if comm.rank == leaders(sets, comm.size)[-1]:
        os.remove(f'{folder}/snapshot_iter_6.{comm.rank}')
        os.utime(f'{folder}/snapshot_iter_2.{comm.rank}')  # not by the time of the file
    comm.barrier()
    assert resume(comm, folder, sets).updater.iteration == 4


def test_a_damaged_snapshot_is_passed_over(comm, folder, sets):
    run_with_snapshots(comm, folder, sets, 0)
    if comm.rank == leaders(sets, comm.size)[-1]:
        with open(f'{folder}/snapshot_iter_6.{comm.rank}', 'r+b') as file:
            file.truncate(30)
    comm.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        trainer = resume(comm, folder, sets)
    assert trainer.updater.iteration == 4
    assert [w.category for w in caught] == ([RuntimeWarning] if comm.rank == 0 else [])


def test_nothing_to_load(comm, folder, sets):
    assert resume(comm, folder, sets).updater.iteration == 0


def test_snapshot_on_error(comm, folder):
    def fail(trainer):
        raise RuntimeError('on purpose')

    trainer = make_trainer(comm, folder, 0)
    trainer.extend(multi_node_snapshot(
        comm, extensions.snapshot(snapshot_on_error=True), []), trigger=(1000, 'iteration'))
    trainer.extend(fail, trigger=(3, 'iteration'))
    with pytest.raises(RuntimeError, match='on purpose'):
        trainer.run()
    comm.barrier()
    assert os.listdir(folder) == ['snapshot_iter_3.0']


def test_a_function_as_file_name(comm, folder):
    run_with_snapshots(comm, folder, [], 0, filename=lambda t: f'at {t.updater.iteration}')
    assert sorted(os.listdir(folder)) == ['at 2.0', 'at 4.0', 'at 6.0']
    with pytest.raises(ValueError, match='autoload'):
        multi_node_snapshot(
            comm, extensions.snapshot(filename=lambda t: 'x', autoload=True), [])


def test_trigger_and_priority_are_those_of_the_snapshot(comm):
    snapshot = extensions.snapshot()
    ours = multi_node_snapshot(comm, snapshot, [])
    assert (ours.trigger, ours.priority) == (snapshot.trigger, snapshot.priority)


@pytest.mark.parametrize('sets, parsed', [
    ([], [{0, 1, 2, 3}]),
    ([[0]], [{0}, {1, 2, 3}]),
    ([[0, 1]], [{0, 1}, {2, 3}]),
    ([range(2), [2], [3]], [{0, 1}, {2}, {3}]),
])
def test_ranks_that_are_not_named_form_a_set(sets, parsed):
    assert _parse_replica_sets(sets, 4) == parsed


def test_bad_sets():
    with pytest.raises(AssertionError, match='one replica set'):
        _parse_replica_sets([[0], [0, 1]], 4)
    with pytest.raises(AssertionError, match='rank 4'):
        _parse_replica_sets([[4]], 4)
