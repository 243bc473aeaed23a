"""Errors of debug mode give parameters and ranks: gradients, means and replicas."""

import contextlib
import re

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import chainermn
from chainermn._consistency import debug_checks


class Model(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first = L.Linear(4, 5)
            self.last = L.Linear(5, 3)

    def forward(self, x):
        return F.sum(self.last(F.relu(self.first(x))))


@pytest.fixture
def flat(monkeypatch):
    """In debug mode."""
    monkeypatch.setenv('CHAINERMN_DEBUG', '1')
    comm = chainermn.create_communicator('flat')
    yield comm
    comm.finalize()


def set_gradients(model):
    for param in model.params():
        param.grad = np.ones_like(param.array)


@pytest.mark.parametrize('value, on', [('1', True), ('0', False), ('', False), (None, False)])
def test_debug_mode(monkeypatch, value, on):
    if value is None:
        monkeypatch.delenv('CHAINERMN_DEBUG', raising=False)
    else:
        monkeypatch.setenv('CHAINERMN_DEBUG', value)
    comm = chainermn.create_communicator('naive')
    model = Model()
    for debug in (False, True):
        set_gradients(model)
        model.first.b.grad[0] = np.nan
        with chainer.using_config('debug', debug), pytest.raises(
                ValueError, match='Parameters diverged before') if on or debug else (
                contextlib.nullcontext()):
            comm.multi_node_mean_grad(model)
    comm.finalize()


@pytest.mark.parametrize('options', [{}, {'compression': 'fp16'}], ids=['', 'compressed'])
def test_non_finite_gradients(flat, same_error, options):
    for odd in range(flat.size):
        model = Model()
        set_gradients(model)
        if flat.rank == odd:
            model.last.W.grad[2, 1:3] = -np.inf
        error = same_error(lambda: flat.multi_node_mean_grad(model, **options), failed=odd)  # noqa: B023
        assert isinstance(error, ValueError)
        assert ('Parameters diverged before allreduce: the gradient of /last/W is not finite '
                '(2 of 15 elements; the first is -inf at index [2, 1]). Lower ') in str(error)
        np.testing.assert_array_equal(model.first.W.grad, 1)  # no mean has spread
        set_gradients(model)
        flat.multi_node_mean_grad(model, **options)


@pytest.mark.parametrize('value', [np.nan, np.inf, np.finfo('f').max])
def test_message_of_chainermn_7(comm, name, same_error, monkeypatch, value):
    """A gradient is not finite on all ranks, on the last rank, or only in the sum."""
    monkeypatch.delenv('CHAINERMN_DEBUG', raising=False)
    if name == 'dummy' or (comm.size == 1 and np.isfinite(value)):
        return
    everyone = range(comm.size)
    for odd in [everyone] if np.isfinite(value) else [everyone, everyone[-1:]]:
        model = Model()
        set_gradients(model)
        if comm.rank in odd:
            model.first.W.grad[0, 0] = value
        with chainer.using_config('debug', True):
            error = same_error(lambda: comm.multi_node_mean_grad(model), table=False)  # noqa: B023
        assert isinstance(error, ValueError)
        assert re.match('.* diverged .*', str(error))


def test_replicas(comm, name, same_error):
    model = Model()
    comm.bcast_data(model)
    comm.check_replicas(model)
    if comm.size == 1 or name == 'dummy':
        return
    for odd in range(comm.size):
        before = model.last.b.array[1]
        if comm.rank == odd:
            model.last.b.array[1] = np.nextafter(before, np.float32(9))
        error = same_error(lambda: comm.check_replicas(model), table=False)
        assert isinstance(error, ValueError)
        assert '1 of 4 parameters differ between ranks. Their checksums:\n  /last/b: ' in str(error)
        assert f' on rank {odd}' in str(error)
        model.last.b.array[1] = before
    comm.check_replicas(model)


@pytest.mark.parametrize('options', [{}, {'overlap': True}], ids=['', 'overlap'])
def test_the_optimizer_names_the_gradient(flat, same_error, options):
    model = Model()
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(.01), flat, **options).setup(model)
    x = np.ones((2, 4), 'f')
    for _ in range(3):
        optimizer.update(model, x)
    bad = x * np.float32(np.nan) if flat.rank == flat.size - 1 else x
    error = same_error(lambda: optimizer.update(model, bad), failed=flat.size - 1)
    assert 'the gradient of /first/' in str(error)


def test_the_optimizer_compares_replicas(flat, same_error, monkeypatch):
    monkeypatch.setenv('CHAINERMN_DEBUG_EVERY', '3')
    model = Model()
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(.01), flat).setup(model)
    x = np.ones((2, 4), 'f')
    for _ in range(1 + 4):  # the first one broadcasts
        optimizer.update(model, x)
    if flat.rank == 0:
        model.first.W.array[0, 0] += 1
    optimizer.update(model, x)
    if flat.size > 1:
        error = same_error(lambda: optimizer.update(model, x), table=False)
        assert 'differ between ranks. Their checksums:\n  /first/W: ' in str(error)


def test_debug_mode_on_one_rank_only(naive, same_error, monkeypatch):
    """There is no error until the first comparison."""
    monkeypatch.setenv('CHAINERMN_DEBUG_EVERY', '3')
    model, x = Model(), np.ones((2, 4), 'f')
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(.01), naive).setup(model)
    with chainer.using_config('debug', naive.rank == 0):
        for _ in range(1 + 2):
            optimizer.update(model, x)
        if naive.size == 1:
            return
        error = same_error(lambda: [optimizer.update(model, x) for _ in range(2)])
    assert 'rank 0: the comparison of the models in debug mode (allgather_obj)' in str(error)
    assert 'Enable debug mode (CHAINERMN_DEBUG=1 or chainer.set_debug(True)) on all ranks' in str(
        error)


def test_how_often_it_compares(flat, same_error, monkeypatch):
    monkeypatch.setenv('CHAINERMN_DEBUG_EVERY', 'often')
    model = Model()
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(.01), flat).setup(model)
    optimizer.update(model, np.ones((2, 4), 'f'))
    error = same_error(lambda: optimizer.update(model, np.ones((2, 4), 'f')), table=False)
    assert 'CHAINERMN_DEBUG_EVERY must be a positive integer' in str(error)


@pytest.mark.parametrize('value', ['0', 'often'])
def test_create_communicator_reports_a_wrong_number_of_updates(same_error, monkeypatch, value):
    monkeypatch.setenv('CHAINERMN_DEBUG_EVERY', value)
    error = same_error(lambda: chainermn.create_communicator('naive'), table=False)
    assert f'CHAINERMN_DEBUG_EVERY must be a positive integer (a number of updates), not {value!r}'\
        in str(error)


def test_check_means():
    model = Model()
    set_gradients(model)
    debug_checks.check_means(model)
    model.last.b.grad = np.array([1, np.inf, 0], np.float32)
    with pytest.raises(ValueError, match='mean gradient of /last/b is not finite'):
        debug_checks.check_means(model)

