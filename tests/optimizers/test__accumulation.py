"""Several updates per step give the same result as one update with all their batches."""

import chainer
import numpy as np
import pytest
from chainer import optimizers
from shared_fixtures import communicators, raises_on_all

import chainermn

N_IN, N_OUT, N_LOCAL = 4, 3, 5

comm = communicators('flat')


class Net(chainer.Chain):
    def __init__(self, seed, dtype=np.float64):
        super().__init__()
        normal = chainer.initializers.Normal(0.5, dtype, rng=np.random.RandomState(seed))
        with chainer.using_config('dtype', dtype), self.init_scope():
            self.first = chainer.links.Linear(N_IN, 5, initialW=normal)
            self.last = chainer.links.Linear(5, N_OUT, initialW=normal)
            self.late = chainer.links.Linear(5, N_OUT, initialW=normal)

    def forward(self, x, t, late=False):
        h = chainer.functions.tanh(self.first(x))
        y = self.last(h) + (self.late(h) if late else 0)
        return chainer.functions.mean_squared_error(y, t)


def batch(seed, dtype=np.float64):
    random = np.random.RandomState(seed)
    return (random.normal(size=(N_LOCAL, N_IN)).astype(dtype),
            random.normal(size=(N_LOCAL, N_OUT)).astype(dtype))


def weights(model):
    return {name: param.array.copy() for name, param in model.namedparams()}


def make(comm, n, actual=None, dtype=np.float64):
    model = Net(comm.rank, dtype)
    optimizer = chainermn.create_multi_node_optimizer(
        actual or optimizers.MomentumSGD(0.1), comm, n_accumulations=n).setup(model)
    optimizer.update(model, *batch(0, dtype), late=True)  # only broadcasts
    return optimizer, model


def test_updates_that_do_not_step(comm):
    """Parameters and gradients do not change, and no rank waits for another."""
    calls = []
    optimizer, model = make(comm, 3)
    optimizer.add_hook(lambda optimizer: calls.append(optimizer.t), 'calls')
    before = weights(model)
    for update in range(1, 3):
        optimizer.update(model, *batch(update))
        np.testing.assert_equal(weights(model), before)
        assert all(param.grad is None for param in model.params())
        assert calls == []
        if comm.size > 1:  # one rank is behind the others, which must not matter
            if comm.rank == 0:
                comm.send_obj(update, 1)
            elif comm.rank == 1:
                assert comm.recv_obj(0) == update
    optimizer.update(model, *batch(3))
    assert calls == [0]


def test_float16_is_added_in_float32(comm):
    link = chainer.Link()
    with link.init_scope():
        link.w = chainer.Parameter(np.zeros(3, np.float16))
    optimizer = chainermn.create_multi_node_optimizer(
        optimizers.SGD(0), comm, n_accumulations=3).setup(link)
    optimizer.update()
    for n in range(3):
        link.w.grad = np.array([60000, 2048 if n == 0 else 1, 0.5], np.float16)
        optimizer.update()
    np.testing.assert_array_equal(link.w.grad, np.array([60000, 2050 / 3, 0.5], np.float16))


def test_setup_drops_what_was_accumulated(comm):
    optimizer, model = make(comm, 2, optimizers.SGD(1.))
    optimizer.update(model, *batch(1))
    optimizer.setup(model)
    optimizer.update(model, *batch(2))  # broadcasts
    before = model.first.W.array.copy()
    model.cleargrads()
    model(*batch(3)).backward()
    step = model.first.W.grad.copy()
    for _ in range(2):
        optimizer.update(model, *batch(3))
    np.testing.assert_allclose(model.first.W.array, before - step)


@pytest.mark.parametrize('n, kind', [(0, ValueError), (-1, ValueError), (1.5, TypeError),
                                     ('2', TypeError), (True, TypeError), (None, TypeError)])
def test_bad_numbers_raise_on_all_ranks(comm, n, kind):
    model = Net(0)
    model.cleargrads()
    with raises_on_all(kind, match='n_accumulations must be a positive integer'):
        chainermn.create_multi_node_optimizer(
            optimizers.SGD(), comm,
            n_accumulations=n if comm.rank == comm.size - 1 else 1).setup(model).update()
