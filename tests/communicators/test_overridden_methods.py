"""Subclasses that override one method of ChainerMN 7: it is called wherever version 7 called it."""

import chainer
import chainer.functions as F
import numpy as np
import pytest
from each_case import each_case
from mpi4py import MPI
from version7 import Proxy

import chainermn
import chainermn.functions as mnf
from chainermn.communicators._mpi_channel import MpiChannel
from chainermn.communicators.flat_communicator import FlatCommunicator
from chainermn.communicators.naive_communicator import NaiveCommunicator

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
X = np.arange(3, dtype='f') + RANK
ALL = sum(np.arange(3, dtype='f') + rank for rank in range(SIZE))


def _scatter_dataset(comm):
    shard = chainermn.scatter_dataset([*range(2 * SIZE)] if RANK == 0 else None, comm)
    assert [*shard] == [2 * RANK, 2 * RANK + 1]


def _scatter_index(comm):
    assert chainermn.scatter_index(3 * SIZE, comm) == (3 * RANK, 3 * RANK + 3)


def _evaluator(comm):
    """Rank r has r + 1 examples, and reports r; rank 0 has another key."""
    class Evaluator(chainer.training.extensions.Evaluator):
        def evaluate(self):
            for _ in self._iterators['main']:
                pass
            return {'loss': float(RANK), **({'own': 5.} if RANK == 0 else {})}

    iterator = chainer.iterators.SerialIterator([0] * (RANK + 1), 1, repeat=False)
    evaluator = chainermn.create_multi_node_evaluator(Evaluator(iterator, lambda x: x), comm)
    counts = np.arange(SIZE) + 1
    assert evaluator.evaluate() == {
        'loss': pytest.approx(np.sum(counts * np.arange(SIZE)) / counts.sum()), 'own': 5.}


def _generic_evaluator(comm):
    iterator = chainer.iterators.SerialIterator([RANK] * 2, 1, repeat=False, shuffle=False)
    evaluator = chainermn.extensions.GenericMultiNodeEvaluator(
        comm, iterator, lambda xs: int(xs[0]))
    assert evaluator() == ([*range(SIZE)] * 2 if RANK == 0 else None)


def _aggregator(comm):
    trainer = type('Trainer', (), {'observation': {'x': float(RANK)}})()
    trainer.updater = type('Updater', (), {'iteration': 1})()
    chainermn.extensions.ObservationAggregator(comm, 'x', 'mean')(trainer)
    assert trainer.observation['mean'] == pytest.approx((SIZE - 1) / 2)


def _optimizer(comm):
    model = chainer.links.Linear(3, 2, initialW=RANK)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(1.), comm)
    optimizer.setup(model)
    for _ in range(2):
        optimizer.update(lambda: F.sum(model(X[None])))
    np.testing.assert_allclose(model.W.array, [-ALL / SIZE] * 2, rtol=1e-6)


def _checkpointer(comm):
    model = chainer.links.Linear(3, 2)
    optimizer = chainer.optimizers.SGD().setup(model)
    updater = chainer.training.StandardUpdater(
        chainer.iterators.SerialIterator([X] * 4, 1), optimizer, loss_func=lambda x: None)
    checkpointer = chainermn.create_multi_node_checkpointer('none', comm, path='/nowhere')
    trainer = chainer.training.Trainer(updater, (1, 'iteration'))
    checkpointer.maybe_load(trainer)
    assert updater.iteration == 0


def _backward(function, x, expected, expected_gradient):
    def run(comm):
        v = chainer.Variable(x.copy())
        y = function(comm, v)
        np.testing.assert_allclose(y.array, expected)
        y.grad = np.full_like(y.array, RANK + 1)
        y.backward()
        np.testing.assert_allclose(0 if v.grad is None else v.grad, expected_gradient)
    return run


_N = SIZE * (SIZE + 1) / 2  # sum of the gradients of all ranks
_bcast = _backward(lambda comm, x: mnf.bcast(comm, x), X, np.arange(3),
                   np.full(3, _N if RANK == 0 else 0))
_allgather = _backward(lambda comm, x: F.stack(mnf.allgather(comm, x)), X,
                       [np.arange(3) + rank for rank in range(SIZE)], np.full(3, _N))


def _send(comm):
    x = chainer.Variable(X)
    if RANK == 0:
        mnf.send(2 * x, comm, 1).backward()
        np.testing.assert_array_equal(x.grad, np.full(3, 6))
    elif RANK == 1:
        y = mnf.recv(comm, 0)
        np.testing.assert_array_equal(y.array, 2 * np.arange(3))
        y.grad = np.full_like(y.array, 3)
        y.backward()


def _many(comm):
    found = comm.allreduce_many([X, 2 * X], 'sum')
    np.testing.assert_array_equal(found, [ALL, 2 * ALL])
    np.testing.assert_allclose(comm.multi_node_mean(X), ALL / SIZE, rtol=1e-6)


def _group(comm):
    group = comm.new_group([0])
    assert (group is None) == (RANK != 0)
    if group is not None:
        assert group.allreduce_obj(3) == 3


#: Features, and the methods that version 7 called in each; for those that it lacks, what it would.
FEATURES = [
    (_scatter_dataset, 'bcast_obj'), (_scatter_dataset, 'send_obj'), (_scatter_dataset, 'recv_obj'),
    (_scatter_index, 'send_obj'), (_scatter_index, 'recv_obj'),
    (_evaluator, 'allreduce_obj'), (_generic_evaluator, 'gather_obj'),
    (_aggregator, 'gather_obj'), (_aggregator, 'bcast_obj'),
    (_optimizer, 'bcast_data'), (_optimizer, 'multi_node_mean_grad'),
    (_checkpointer, 'gather_obj'), (_checkpointer, 'bcast_obj'),
    (_bcast, 'bcast'), (_bcast, 'gather'), (_allgather, 'allgather'), (_allgather, 'alltoall'),
    (_send, 'send'), (_send, 'recv'), (_many, 'allreduce'), (_group, 'split')]


def counting(base, name, is_late=False):
    """A class that counts the calls of one method."""
    def method(self, *args, **kwargs):
        method.calls += 1
        return getattr(super(cls, self) if base is not Proxy else self._proxied, name)(
            *args, **kwargs)

    method.calls = 0
    cls = type('Counting', (base,), {} if is_late else {name: method})
    setattr(cls, name, method)
    return cls, method


@pytest.mark.mpi(min_size=2)
@pytest.mark.every_size
@each_case('base, feature, name', [
    (base, *each) for base in (NaiveCommunicator, FlatCommunicator, Proxy) for each in FEATURES])
def test_it_is_called(base, feature, name):
    cls, method = counting(base, name)
    comm = cls(NaiveCommunicator(MPI.COMM_WORLD) if base is Proxy else MPI.COMM_WORLD)
    if base is Proxy and feature in (_many, _group):  # direct calls, which the proxy forwards
        return
    feature(comm)
    calls = MPI.COMM_WORLD.allgather(method.calls)
    assert any(calls) if 'send' in name or 'recv' in name else all(calls), calls
    comm.finalize()


@pytest.mark.mpi(min_size=2)
def test_a_method_that_is_added_later():
    cls, method = counting(NaiveCommunicator, 'gather_obj', is_late=True)
    comm = cls(MPI.COMM_WORLD)
    assert comm.allgather_obj(RANK) == [*range(SIZE)]
    assert method.calls == 1
    comm.finalize()


@each_case('base', [NaiveCommunicator, FlatCommunicator])
def test_classes_without_such_methods_keep_their_own(base):
    class Own(base):
        def gather_obj(self, obj, root=0):
            return super().gather_obj(obj, root)

        def allgather_obj(self, obj):
            return ['own']

    class Plain(base):
        pass

    for cls in base, Plain, Own:
        comm = cls(MPI.COMM_WORLD)
        for name in 'scatter_obj', 'reduce', 'allreduce_many':
            assert getattr(cls, name) is getattr(base, name)
            assert getattr(cls, name) is not getattr(chainermn.CommunicatorBase, name)
        assert comm._chainermn_channel.send_activation.__func__ is MpiChannel.send_activation
        assert comm.allgather_obj(RANK) == (['own'] if cls is Own else [*range(SIZE)])
        comm.finalize()


def _train(comm, **options):
    model = chainer.links.Linear(3, 2, initialW=0)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(1), comm, **options).setup(model)
    for _ in range(3):  # the first update broadcasts
        optimizer.update(lambda x: F.sum(model(x)), np.ones((1, 3), 'f'))
    return model.W.array


@pytest.mark.mpi(min_size=2)
def test_a_mean_that_is_replaced_in_a_class_of_ours(monkeypatch, same_error):
    """Shards use it; overlap cannot, until it is restored."""
    def zeros(self, model, zero_fill=False):
        for param in model.params():
            param.grad = np.zeros_like(param.array)

    with monkeypatch.context() as patch:
        patch.setattr(NaiveCommunicator, 'multi_node_mean_grad', zeros)
        comm = NaiveCommunicator(MPI.COMM_WORLD)
        assert (_train(comm, shard_states=True) == 0).all()
        error = same_error(lambda: _train(comm, overlap='always'))
        assert 'in its own multi_node_mean_grad' in str(error)
    assert (_train(comm, overlap='always') == -2).all()
    comm.finalize()


@pytest.mark.mpi(min_size=2)
def test_a_mean_of_one_rank_cannot_overlap(same_error):
    class Own(NaiveCommunicator):
        def multi_node_mean_grad(self, model, zero_fill=False):
            super().multi_node_mean_grad(model, zero_fill)

    comm = (Own if RANK == 1 else NaiveCommunicator)(MPI.COMM_WORLD)
    error = same_error(comm.mean_queue)
    assert 'Own averages gradients in its own multi_node_mean_grad' in str(error)
    comm.barrier()
    comm.finalize()

