"""Hooks with sharded states: gradients of zero, and hooks on one rank.

``test_traffic.py`` counts the bytes; the laws of training compare the parameters.
"""

import chainer.functions as F
import chainer.links as L
import pytest
from chainer import optimizer_hooks as hooks
from chainer import optimizers
from shared_fixtures import raises_on_all

import chainermn

pytestmark = [pytest.mark.every_size, pytest.mark.mpi(min_size=2)]

N_IN, N_OUT = 6, 4


CLIPPING, LARS = lambda: hooks.GradientClipping(.01), hooks.GradientLARS


def test_gradients_of_zero(comm):
    model = L.Linear(N_IN, N_OUT)
    optimizer = chainermn.create_multi_node_optimizer(
        optimizers.SGD(), comm, shard_states=True).setup(model)
    for hook in CLIPPING, LARS:
        optimizer.add_hook(hook())
    for _ in range(2):
        optimizer.update(lambda: F.sum(0 * model.W))
    assert optimizer.t == 1


def test_a_hook_on_one_rank(comm):
    """It gets all gradients, so all ranks get them."""
    model, seen = L.Linear(N_IN, 50), []
    optimizer = chainermn.create_multi_node_optimizer(
        optimizers.SGD(), comm, shard_states=True, compare_settings=False).setup(model)
    if comm.rank == 0:
        optimizer.add_hook(lambda optimizer: seen.append(model.W.grad.copy()), 'log')
    for step in range(4):
        if step == 3:
            optimizer.add_hook(CLIPPING(), 'clipping')
        optimizer.update(lambda: F.sum(model.W) * comm.rank)
    for grad in seen:
        assert set(grad.ravel()) == {(comm.size - 1) / 2}
    assert len(seen) == 3 * (comm.rank == 0)


def test_a_hook_added_later_on_one_rank(comm):
    model = L.Linear(N_IN, 50)
    optimizer = chainermn.create_multi_node_optimizer(
        optimizers.SGD(), comm, shard_states=True, compare_settings=False).setup(model)
    for _ in range(2):
        optimizer.update(lambda: F.sum(model.W))
    if comm.rank == 0:
        optimizer.add_hook(lambda optimizer: None, 'log')
    with raises_on_all(ValueError, match='Collective mismatch'):
        optimizer.update(lambda: F.sum(model.W))
