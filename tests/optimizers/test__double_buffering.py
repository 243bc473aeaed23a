"""Double buffering: which gradients each step uses."""

import chainer
import numpy as np
import pytest
from chainer import optimizers
from shared_fixtures import communicators

import chainermn

LR = 0.25

comm = communicators('overlapping')


class Parabola(chainer.Link):
    """Loss |w - goal|^2 / 2, whose gradient is w - goal."""

    def __init__(self, start):
        super().__init__()
        with self.init_scope():
            self.w = chainer.Parameter(np.array(start, np.float64))

    def forward(self, goal):
        return chainer.functions.sum((self.w - goal) ** 2) / 2


def goal_of(rank, update):
    return np.array([rank + 1.0, update * update - 3.0 * rank])


def train(comm, n_updates, before_update=lambda optimizer, update: None, bare=False,
          n_waits=0):
    """The weights after each update, which is followed by ``n_waits`` calls of ``wait``."""
    model = Parabola([float(comm.rank), 5.0])
    optimizer = chainermn.create_multi_node_optimizer(
        optimizers.SGD(LR), comm, double_buffering=True).setup(model)
    weights = []
    for update in range(1, n_updates + 1):
        before_update(optimizer, update)
        goal = goal_of(comm.rank, update)
        if bare:
            model.cleargrads()
            model(goal).backward()
            optimizer.update()
        else:
            optimizer.update(model, goal)
        for _ in range(n_waits):
            optimizer.wait()
        weights.append(model.w.array.copy())
    optimizer.wait()
    assert optimizer.t == max(0, n_updates - 2)
    return weights


def expected_weights(size, n_updates):
    w = np.array([0.0, 5.0])  # rank 0's
    weights, gradients = [], {}
    for update in range(1, n_updates + 1):
        gradients[update] = np.mean([w - goal_of(rank, update) for rank in range(size)], axis=0)
        if update >= 3:
            w = w - LR * gradients[update - 1]
        weights.append(w)
    return weights


@pytest.mark.parametrize('n_waits', [1, 2])
def test_waiting_keeps_the_gradients_for_the_next_update(comm, n_waits):
    np.testing.assert_allclose(train(comm, 6, n_waits=n_waits), expected_weights(comm.size, 6),
                               rtol=1e-12)


def test_setup_drops_gradients_in_flight(comm):
    optimizer = chainermn.create_multi_node_optimizer(
        optimizers.SGD(LR), comm, double_buffering=True).setup(Parabola([1.0, 2.0]))
    for _ in range(3):
        optimizer.update(optimizer.target, np.ones(2))
    optimizer.wait()
    optimizer.setup(Parabola([float(comm.rank), 5.0]))
    weights = []
    for update in range(1, 5):
        optimizer.update(optimizer.target, goal_of(comm.rank, update))
        optimizer.wait()
        weights.append(optimizer.target.w.array.copy())
    np.testing.assert_allclose(weights, expected_weights(comm.size, 4), rtol=1e-12)


def test_update_returns_while_gradients_are_in_flight(comm):
    """The next update, or wait, is the first one to wait for them."""
    def look(optimizer, update):
        if update > 2:
            assert comm.mean_queue().pending
        if update == 4:
            optimizer.wait()
            assert not comm.mean_queue().pending

    weights = train(comm, 5, before_update=look)
    np.testing.assert_allclose(weights, expected_weights(comm.size, 5), rtol=1e-12)


@pytest.mark.mpi(min_size=2)
def test_gradients_that_differ_are_an_error_before_they_are_sent(comm):
    model = Parabola([1.0, 2.0])
    optimizer = chainermn.create_multi_node_optimizer(
        optimizers.SGD(LR), comm, double_buffering=True).setup(model)
    optimizer.update(model, np.ones(2))
    if comm.rank == 0:
        model.w.grad = None
        optimizer.zero_fill = False
    with pytest.raises(ValueError, match='queue_gradients'):
        optimizer.update(*() if comm.rank == 0 else (model, np.ones(2)))
    assert not comm.mean_queue().pending


def test_an_error_of_the_exchange_is_raised_by_the_next_update(comm):
    class Failing:
        encoded_dtype = 'float32'

        def compress(self, x, key):
            return x.astype('f')

        def decompress(self, encoded, size, dtype):
            raise OverflowError('does not fit')

    model = Parabola([1.0, 2.0])
    optimizer = chainermn.create_multi_node_optimizer(
        optimizers.SGD(LR), comm, double_buffering=True, compression=Failing()).setup(model)
    for _ in range(2):
        optimizer.update(model, np.ones(2))
    with pytest.raises(OverflowError, match='does not fit'):
        optimizer.update(model, np.ones(2))
    assert optimizer.t == 0


def test_attributes_of_the_exchange(comm):
    model = Parabola([1.0, 2.0])
    optimizer = chainermn.create_multi_node_optimizer(
        optimizers.SGD(LR), comm, double_buffering=True).setup(model)
    assert isinstance(optimizer, chainermn.MultiNodeOptimizer)
    assert {'wait', 'swap_grad', 'communicated_target', 'zero_fill'} <= set(dir(optimizer))
    assert optimizer.communicated_target is None
    optimizer.update(model, np.ones(2))
    assert type(optimizer.communicated_target) is Parabola
    assert optimizer.communicated_target is not model
    assert not hasattr(optimizer, 'buckets')


@pytest.mark.parametrize('odd', ['all ranks', 'last rank'])
def test_n_accumulations_are_rejected(comm, odd):
    n = 2 if odd == 'all ranks' or comm.rank == comm.size - 1 else 1
    with pytest.raises(ValueError, match='cannot be combined with n_accumulations'):
        chainermn.create_multi_node_optimizer(
            optimizers.SGD(), comm, double_buffering=True, n_accumulations=n)
        comm.barrier()


@pytest.mark.every_size
def test_swap_grad_exchanges_pairwise(comm):
    optimizer = chainermn.create_multi_node_optimizer(
        optimizers.SGD(LR), comm, double_buffering=True)
    one, two = chainer.Parameter(np.zeros(2)), chainer.Parameter(np.zeros(2))
    one.grad, two.grad = np.full(2, 1.0), None
    optimizer.swap_grad([one], [two])
    assert one.grad is None
    np.testing.assert_array_equal(two.grad, [1, 1])


@pytest.mark.parametrize('failing', ['no rank', 'all ranks', 'the last rank'])
def test_a_rank_that_goes_on_after_a_failed_update(comm, failing):
    model = Parabola([1.0, 2.0])
    optimizer = chainermn.create_multi_node_optimizer(
        optimizers.SGD(LR), comm, double_buffering=True).setup(model)
    for update in range(3):
        optimizer.update(model, goal_of(comm.rank, update))
    if failing == 'all ranks' or (failing == 'the last rank' and comm.rank == comm.size - 1):
        with pytest.raises(ZeroDivisionError):
            optimizer.update(lambda: 1 / 0)
    if failing == 'the last rank' and comm.size > 1:
        with pytest.raises(ValueError, match='updates differ between ranks'):
            optimizer.update(model, goal_of(comm.rank, 3))
    else:
        for update in range(3):
            optimizer.update(model, goal_of(comm.rank, update))
        assert optimizer.t == 4
    optimizer.wait()
