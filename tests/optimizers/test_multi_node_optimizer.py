"""Training on several ranks matches training on one rank with all their batches."""


import chainer
import numpy as np
import pytest
from chainer import optimizers
from shared_fixtures import communicators, raises_on_all

import chainermn
from chainermn.optimizers import _MultiNodeOptimizer
from chainermn.optimizers._gradient_averaging import GradientAveraging

pytestmark = pytest.mark.every_size

N_IN, N_OUT, N_LOCAL = 4, 3, 6

comm = communicators('naive')


class Net(chainer.Chain):
    """A link of known size, one of unknown size, and one that is only used on demand."""

    def __init__(self, seed):
        super().__init__()
        rng = np.random.RandomState(seed)
        normal = chainer.initializers.Normal(0.5, dtype=np.float64, rng=rng)
        with chainer.using_config('dtype', np.float64), self.init_scope():
            self.first = chainer.links.Linear(N_IN, 5, initialW=normal)
            self.last = chainer.links.Linear(None, N_OUT, initialW=normal)
            self.late = chainer.links.Linear(None, N_OUT, initialW=normal)

    def forward(self, x, t, late=False):
        h = chainer.functions.tanh(self.first(x))
        y = self.last(h) + (self.late(h) if late else 0)
        return chainer.functions.mean_squared_error(y, t)


def batch(seed, n=N_LOCAL):
    rng = np.random.RandomState(seed)
    return rng.normal(size=(n, N_IN)), rng.normal(size=(n, N_OUT))


def make(comm, actual=None, **kwargs):
    model = Net(seed=comm.rank)
    actual = actual if actual is not None else optimizers.SGD(0.1)
    return chainermn.create_multi_node_optimizer(actual, comm, **kwargs).setup(model), model


def weights(model):
    return {name: param.array.copy() for name, param in model.namedparams()
            if param.is_initialized}


def check_same_on_all_ranks(comm, value):
    ours = comm.allgather_obj(value)
    for theirs in ours[1:]:
        np.testing.assert_equal(theirs, ours[0])


def test_the_same_model_is_broadcast_again_after_setup(comm):
    """Rank 0 may have loaded other weights."""
    optimizer, model = make(comm)
    for _ in range(2):
        optimizer.update(model, *batch(comm.rank))
    if comm.rank == 0:
        model.copyparams(Net(seed=10))
    expected = weights(model)
    optimizer.setup(model)
    optimizer.update(model, *batch(comm.rank))
    assert optimizer.t == 0
    check_same_on_all_ranks(comm, weights(model))
    if comm.rank == 0:
        for name, value in weights(model).items():
            np.testing.assert_array_equal(value, expected[name])
    optimizer.update(model, *batch(comm.rank))
    assert optimizer.t == 1


def test_ranks_that_initialize_other_parameters_all_get_the_error(comm):
    optimizer, model = make(comm)
    for _ in range(2):
        optimizer.update(model, *batch(comm.rank))
    odd_one = comm.rank == comm.size - 1
    if comm.size == 1:
        optimizer.update(model, *batch(0), late=True)  # no other rank differs
        return
    with raises_on_all(Exception, 'bcast_data', 'multi_node_mean_grad'):
        optimizer.update(model, *batch(comm.rank), late=odd_one)
    assert optimizer.t == 1


def test_without_zero_fill_a_parameter_unused_on_one_rank_is_an_error_on_all(comm):
    optimizer, model = make(comm, zero_fill=False)
    optimizer.update(model, *batch(0), late=True)
    optimizer.update(model, *batch(0))  # unused on all ranks: skipped
    assert optimizer.t == 1
    if comm.size == 1:
        return
    with raises_on_all(Exception, 'late'):
        optimizer.update(model, *batch(0), late=comm.rank == 0)


def test_is_a_proxy_of_the_actual_optimizer(comm):
    actual = optimizers.SGD(0.1)
    optimizer, model = make(comm, actual, zero_fill=False)
    assert not isinstance(optimizer, chainer.Optimizer)
    assert optimizer.actual_optimizer is actual
    assert optimizer.communicator is comm
    assert optimizer.zero_fill is False
    assert optimizer.target is actual.target is model
    optimizer.lr = 0.25
    assert actual.lr == 0.25
    optimizer.__setattr__('needs_broadcast', False)
    assert actual.needs_broadcast is False
    with pytest.raises(AttributeError, match="'SGD' object has no attribute 'nonsense'"):
        _ = optimizer.nonsense


class TwiceTheMean(GradientAveraging):
    """Another way to exchange gradients, which skips every other step."""

    public = *GradientAveraging.public, 'n_exchanges'

    def __init__(self, *args):
        super().__init__(*args)
        self.n_exchanges = 0

    def mean(self, shard):
        self.n_exchanges += 1
        for param in self.actual_optimizer.target.params(include_uninit=False):
            param.grad = 2 * self.communicator.allreduce(param.grad) / self.communicator.size
        return self.n_exchanges % 2 == 0


def test_another_way_to_exchange_is_one_class(comm):
    model, sgd = chainer.Link(), optimizers.SGD(0.5)
    with model.init_scope():
        model.w = chainer.Parameter(np.full(2, comm.rank + 1.))
    optimizer = chainermn.MultiNodeOptimizer(
        sgd, comm, True, TwiceTheMean(sgd, comm, True)).setup(model)
    for n in range(4):  # the first one broadcasts
        optimizer.update(lambda: chainer.functions.sum(model.w) * (comm.rank + 1.))
        assert optimizer.n_exchanges == n
    assert optimizer.t == 1
    np.testing.assert_allclose(model.w.array, 1 - 0.5 * (comm.size + 1))
    optimizer.n_exchanges = 9
    assert 'n_exchanges' in dir(optimizer)
    assert optimizer._averaging.n_exchanges == 9
    assert not hasattr(sgd, 'n_exchanges')


class Derived(_MultiNodeOptimizer):
    """As programs for ChainerMN 7 derive from its class."""

    def update(self, lossfun=None, *args, **kwds):
        super().update(lossfun, *args, **kwds)
        self.actual_optimizer.n_updates = getattr(self, 'n_updates', 0) + 1


@pytest.mark.parametrize('zero_fill', [True, False])
def test_a_derived_class(comm, zero_fill):
    optimizer, plain = (make(optimizers.SGD(0.1), comm, zero_fill).setup(Net(comm.rank))
                        for make in (Derived, lambda actual, comm, zero_fill:
                                     chainermn.create_multi_node_optimizer(
                                         actual, comm, zero_fill=zero_fill)))
    for step in range(3):
        for each in optimizer, plain:
            each.update(each.target, *batch(comm.size * step + comm.rank))
    assert (optimizer.n_updates, optimizer.t, optimizer.zero_fill) == (3, 2, zero_fill)
    np.testing.assert_equal(weights(optimizer.target), weights(plain.target))
    check_same_on_all_ranks(comm, weights(optimizer.target))


@pytest.mark.parametrize('options, more', [
    ({}, []), ({'overlap': 'always'}, ['buckets', 'n_early']), ({'n_accumulations': 2}, []),
    ({'shard_states': True}, [])])
def test_attributes_of_the_exchange(comm, options, more):
    optimizer, _ = make(comm, **options)
    present = [name for name in ('buckets', 'n_early', 'wait', 'swap_grad', 'communicated_target')
               if hasattr(optimizer, name)]
    assert present == (more if comm.size > 1 else [])
    optimizer.zero_fill = False
    assert optimizer.zero_fill is False
    assert not hasattr(optimizer.actual_optimizer, 'zero_fill')


def test_is_changed_compares_with_the_last_call(comm):
    optimizer, model = make(comm)
    assert optimizer.target_params == []
    assert optimizer.is_changed(model)
    assert ('/last/W', False) in optimizer.target_params
    assert not optimizer.is_changed(model)
    model(*batch(0))
    assert optimizer.is_changed(model)
    assert ('/last/W', True) in optimizer.target_params
