"""Uneven inputs: means over active ranks, identical models, and the same error on all ranks."""

import contextlib

import chainer
import numpy as np
import pytest
from chainer import links as L
from chainer import optimizers
from overlapping_communicator import OverlappingCommunicator
from shared_fixtures import communicators, raises_on_all

import chainermn

pytestmark = pytest.mark.every_size

comm = communicators('naive')


class Recorder:
    """A hook that keeps the gradients that the steps use."""

    name = 'recorder'
    timing = 'pre'

    def __init__(self):
        self.seen = []

    def __call__(self, optimizer):
        self.seen.append({name: param.grad.copy() for name, param in
                          optimizer.target.namedparams(include_uninit=False)})


class Slope(chainer.Link):
    """Loss w * x, whose gradient is x."""

    def __init__(self, dtype=np.float64):
        super().__init__()
        with self.init_scope():
            self.w = chainer.Parameter(np.zeros(3, dtype))
        self.add_persistent('calls', 0)

    def forward(self, x):
        self.calls += 1
        return chainer.functions.sum(self.w * np.full(3, x, self.w.dtype))


def make(comm, model=None, actual=None, **kwargs):
    model = Slope() if model is None else model
    actual = optimizers.MomentumSGD(0.1) if actual is None else actual
    optimizer = chainermn.create_multi_node_optimizer(actual, comm, **kwargs).setup(model)
    optimizer.add_hook(Recorder(), 'recorder')
    return optimizer, model


def seen(optimizer, name='/w'):
    return [grads[name].flat[0] for grads in
            optimizer.actual_optimizer._hookable._pre_update_hooks['recorder'].seen]


def value(rank, n):
    """The gradient of a rank's n-th batch."""
    return (rank + 1) * 100.0 + n


def state(optimizer):
    """All that has to be equal on the ranks."""
    serializer = chainer.serializers.DictionarySerializer()
    serializer['model'].save(optimizer.target)
    serializer['optimizer'].save(optimizer.actual_optimizer)
    return {key: x.tobytes() if x.dtype != object else None
            for key, x in serializer.target.items()}


def check_equal_on_all_ranks(comm, optimizer):
    states = comm.allgather_obj(state(optimizer))
    assert all(theirs == states[0] for theirs in states)


def train(comm, count, optimizer, **kwargs):
    with chainermn.join(optimizer, **kwargs):
        for n in range(count):
            optimizer.update(optimizer.target, value(comm.rank, n))


@pytest.mark.parametrize('zero_fill', [True, False])
@pytest.mark.parametrize('empty', ['first', 'last', 'all but one'])
def test_a_rank_without_batches_learns_the_shapes(comm, empty, zero_fill):
    class Net(chainer.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.norm = L.BatchNormalization(axis=0)
                self.lazy = L.Linear(None, 2, nobias=True)
                self.never = L.Linear(None, 2)
                self.late = L.Linear(None, 2, nobias=True)

        def forward(self, n):
            y = self.lazy(self.norm(np.arange(12, dtype='f').reshape(4, 3)))
            return chainer.functions.sum(self.late(y) if n > 2 else y)

    n = comm.size - 1
    count = {'first': 6 if comm.rank or not n else 0, 'last': 0 if n and comm.rank == n else 6,
             'all but one': 6 if comm.rank == n // 2 else 0}[empty]
    optimizer, model = make(comm, Net(), zero_fill=zero_fill)
    model.cleargrads()
    with chainermn.join(optimizer):
        for n in range(count):
            optimizer.update(model, n)
    assert model.lazy.W.shape == (2, 3)
    assert model.late.W.shape == (2, 2)
    assert model.never.W.array is None
    assert model.norm.avg_mean.any()
    assert optimizer.t == 4
    check_equal_on_all_ranks(comm, optimizer)


def test_float16_mean_over_active_ranks_does_not_overflow_on_the_way(comm):
    optimizer, _ = make(comm, Slope('float16'), optimizers.SGD(0))
    with chainermn.join(optimizer, divide_by_initial_world_size=False):
        for _ in range(3 + comm.rank):
            optimizer.update(optimizer.target, 60000.)
    np.testing.assert_array_equal(seen(optimizer), np.full(1 + comm.size, 60000, np.float16))


def test_hyperparameters_end_equal(comm):
    """An extension that changes them runs on active ranks only."""
    optimizer, _ = make(comm)
    with chainermn.join(optimizer):
        for n in range(2 + comm.rank):
            optimizer.update(optimizer.target, 1.)
            optimizer.lr = 1 / (n + 1)
    assert optimizer.lr == 1 / (comm.size + 1)


def check_usable(comm, optimizer):
    train(comm, 2 + comm.rank, optimizer)


def test_early_termination(comm):
    optimizer, model = make(comm)
    if comm.size == 1:
        train(comm, 3, optimizer, throw_on_early_termination=True)
        return
    counts = [4, 3, 5, 3][:comm.size]
    first = 'ranks 1, 3' if comm.size > 3 else 'rank 1'
    with raises_on_all(RuntimeError, f'{first} of {comm.size} exhausted'):
        train(comm, counts[comm.rank], optimizer, throw_on_early_termination=True)
    assert optimizer.t == 2
    assert len({w.tobytes() for w in comm.allgather_obj(model.w.array)}) == 1
    check_usable(comm, optimizer)


class Normalized(chainer.Chain):
    """Makes collective calls in its forward."""

    def __init__(self, comm):
        super().__init__()
        with self.init_scope():
            self.norm = chainermn.links.MultiNodeBatchNormalization(3, comm)

    def forward(self, x):
        return chainer.functions.sum(self.norm(np.full((2, 3), x, np.float32)))


@pytest.mark.parametrize('throw', [False, True])
def test_a_collective_that_cannot_be_shadowed(comm, throw):
    optimizer, model = make(comm, Normalized(comm))
    result = (
        contextlib.nullcontext() if comm.size == 1 else
        raises_on_all(RuntimeError, f'rank 0 of {comm.size} exhausted') if throw else
        raises_on_all(ValueError, 'different operations', 'rank 0: join',
                      'MultiNodeBatchNormalization', 'throw_on_early_termination=True'))
    with result, chainermn.join(optimizer, throw_on_early_termination=throw):
        for n in range(4 if comm.rank else 3):
            optimizer.update(model, n)
    optimizer.update(model, 1)


@pytest.mark.parametrize('kind', ['operation', 'another optimizer'])
def test_a_collective_between_updates(comm, kind):
    """It works until a rank is exhausted."""
    optimizer, model = make(comm)
    other, _ = make(comm)

    def call(count):
        with chainermn.join(optimizer):
            for n in range(count):
                optimizer.update(model, 1.)
                if kind == 'operation':
                    comm.allreduce_obj(n)
                else:
                    other.update(other.target, 2.)

    call(3)
    assert seen(other) == ([] if kind == 'operation' else [2, 2])
    if comm.size > 1:
        texts = ['allreduce_obj', 'ObservationAggregator'] if kind == 'operation' else []
        with raises_on_all(ValueError, 'rank 0: join', *texts):
            call(3 + comm.rank)
    check_usable(comm, optimizer)


class MyError(Exception):
    pass


@pytest.mark.parametrize('when', ['before', 'between', 'while others shadow', 'in lossfun'])
def test_an_error_on_one_rank_is_raised_on_all(comm, when):
    optimizer, model = make(comm)
    odd = comm.size - 1

    def lossfun(n):
        if when == 'in lossfun' and comm.rank == odd and n == 2:
            raise MyError('no luck')
        return model(1.)

    def call():
        with chainermn.join(optimizer):
            if when == 'before' and comm.rank == odd:
                raise MyError('no luck')
            for n in range(9 if comm.rank == odd else 1 if when == 'while others shadow' else 7):
                if when != 'in lossfun' and comm.rank == odd and n == 4:
                    raise MyError('no luck')
                optimizer.update(lossfun, n)

    with pytest.raises(Exception, match='no luck') as caught:
        call()
    assert (type(caught.value) is MyError) == (comm.rank == odd)
    if comm.rank != odd:
        assert f'join failed on rank {odd}' in str(caught.value)
    check_usable(comm, optimizer)


def test_an_error_of_all_ranks_at_once(comm):
    optimizer, model = make(comm)

    with raises_on_all(MyError, 'no luck'), chainermn.join(optimizer):
        optimizer.update(model, 1.)
        raise MyError('no luck')
    check_usable(comm, optimizer)


def test_an_error_while_shadowing(comm):
    optimizer, _ = make(comm)

    def hook(optimizer):
        if comm.rank == 0 and optimizer.t == 3:
            raise ArithmeticError('hooks fail too')

    optimizer.add_hook(hook, 'hook')

    with pytest.raises(ArithmeticError, match='hooks fail too'):
        train(comm, 9 if comm.rank or comm.size == 1 else 2, optimizer)
    optimizer.remove_hook('hook')
    check_usable(comm, optimizer)


def test_what_is_not_finite_in_debug_mode(comm):
    optimizer, model = make(comm)
    with chainer.using_config('debug', True), pytest.raises(ValueError, match='not finite'), \
            chainermn.join(optimizer):
        for n in range(2 + 2 * comm.rank):
            model.cleargrads()
            model(1.).backward()
            model.w.grad[...] = 1 if n < 2 * comm.size - 1 else np.inf
            optimizer.update()
    check_usable(comm, optimizer)


def test_nested(comm):
    optimizer, _ = make(comm)
    other, _ = make(comm)

    for inner in (optimizer, other):
        with raises_on_all(RuntimeError, 'already in a join'), \
                chainermn.join(optimizer), chainermn.join(inner):
            pass
    check_usable(comm, optimizer)


def test_double_buffering_is_rejected(comm):
    overlapping = OverlappingCommunicator(comm.mpi_comm)
    optimizer, _ = make(overlapping, double_buffering=True)
    with raises_on_all(ValueError, 'double_buffering=False'):
        train(comm, 1, optimizer)
    overlapping.finalize()


@pytest.mark.parametrize('what', [lambda: optimizers.SGD(), lambda: None, Slope])
@pytest.mark.parametrize('enable', [True, False])
def test_what_is_no_multi_node_optimizer(what, enable):
    with pytest.raises(TypeError, match='join needs a multi-node optimizer'):
        chainermn.join(what(), enable=enable)


@pytest.mark.parametrize('option', ['divide_by_initial_world_size', 'throw_on_early_termination'])
def test_options_differ(comm, option):
    optimizer, _ = make(comm)
    if comm.size > 1:
        with raises_on_all(ValueError, 'arguments differ', '  rank 0: ', option):
            train(comm, 1, optimizer, **{option: comm.rank == 0})
    check_usable(comm, optimizer)


def test_a_rank_that_does_not_enter(comm):
    optimizer, _ = make(comm)
    if comm.size > 1:
        with raises_on_all(ValueError, 'different operations',
                           'rank 0: the multi-node optimizer (bcast_data)',
                           'Enter it on all ranks or on none'):
            train(comm, 3, optimizer, enable=comm.rank != 0)
    check_usable(comm, optimizer)
