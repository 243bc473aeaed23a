"""Hooks that compute with shards of the gradients: the same parameters as without sharded states.

``test_traffic.py`` counts the bytes, the laws of training compare random pairs of options
with one process.
"""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import optimizer_hooks as hooks
from chainer import optimizers
from shared_fixtures import raises_on_all

import chainermn

pytestmark = [pytest.mark.every_size, pytest.mark.mpi(min_size=2)]

N_IN, N_OUT, BATCH, STEPS = 6, 4, 5, 4
TOLERANCES = {'e': 4e-3, 'f': 1e-5, 'd': 1e-11}


class Net(chainer.Chain):
    """Large and small parameters of several dtypes.

    One rank uses those of ``rarely``, none those of ``late``, which are never initialized.
    """

    def __init__(self, dtypes, has_late):
        super().__init__()
        first, second, third = map(np.dtype, dtypes)
        with self.init_scope():
            with chainer.using_config('dtype', first):
                self.a = L.Linear(N_IN, 300)
            with chainer.using_config('dtype', second):
                self.b = L.Linear(None if second == np.float32 else 300, 90)
                self.rarely = L.Linear(3, 2)
            with chainer.using_config('dtype', third):
                self.c = L.Linear(90, N_OUT)
            if has_late:
                self.late = L.Linear(None, 5)  # never initialized

    def forward(self, x, t, is_used):
        h = F.cast(F.tanh(self.a(F.cast(x, self.a.b.dtype))), self.b.b.dtype)
        h = F.cast(F.tanh(self.b(h)), self.c.b.dtype)
        loss = F.softmax_cross_entropy(F.cast(self.c(h), 'f'), t)
        if is_used:
            loss += F.sum(F.cast(self.rarely(np.ones((1, 3), self.rarely.W.dtype)), 'f'))
        return loss


def train(comm, shard, added, dtypes='fff', create=optimizers.Adam, is_scaled=False,
          spoiled=None):
    """Trains; returns the optimizer, and the parameters after each step."""
    np.random.seed(0)
    # Chainer cannot check gradients of uninitialized parameters.
    model = Net(dtypes, has_late=not is_scaled)
    optimizer = chainermn.create_multi_node_optimizer(
        create(), comm, shard_states=shard).setup(model)
    if is_scaled:
        optimizer.loss_scaling()
    for n, hook in enumerate(added):
        optimizer.add_hook(hook(), f'hook {n}')
    seen, scales = [], []
    for step in range(STEPS + 1):
        random = np.random.RandomState(100 * step + comm.rank)
        x, t = random.randn(BATCH, N_IN).astype('f'), random.randint(N_OUT, size=BATCH)
        if spoiled == (step, comm.rank):
            x[0, 0] = np.nan
        optimizer.update(model, x, t, comm.rank == 0)
        seen.append({path: param.array.copy()
                     for path, param in model.namedparams(include_uninit=False)})
        scales.append(optimizer._loss_scale)
    return optimizer, seen, scales


def check(comm, added, dtypes='fff', **arguments):
    arguments['dtypes'] = dtypes
    tolerance = max(map(TOLERANCES.__getitem__, dtypes))
    _, expected, expected_scales = train(comm, False, added, **arguments)
    optimizer, found, scales = train(comm, True, added, **arguments)
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for path, array in theirs.items():
            np.testing.assert_allclose(
                ours[path].astype('d'), array.astype('d'), tolerance, tolerance,
                err_msg=f'{path} after update {step}')
        assert len(set(comm.allgather_obj(b''.join(x.tobytes() for x in ours.values())))) == 1
    assert scales == expected_scales
    assert any((found[0][path] != found[-1][path]).any() for path in found[0])
    return optimizer


def is_short(optimizer):
    """Whether a rank gets the gradients of its shard only."""
    return optimizer._stepper.shards() is not None


CLIPPING, LARS, DECAY = (lambda: hooks.GradientClipping(.01), hooks.GradientLARS,
                         lambda: hooks.WeightDecay(.01))
LASSO, HARD = lambda: hooks.Lasso(.01), lambda: hooks.GradientHardClipping(-.01, .01)
COMBINED = {
    'clipping of large gradients only': [lambda: hooks.GradientClipping(1e3)],
    'clipping, decay': [CLIPPING, DECAY],
    'decay, LARS': [DECAY, LARS],
    'LARS with decay, hard clipping, clipping': [
        lambda: hooks.GradientLARS(weight_decay=.1), HARD, CLIPPING],
    'Lasso': [LASSO],
}


@pytest.mark.parametrize('added', COMBINED.values(), ids=COMBINED)
def test_hooks_compute_with_shards(comm, added):
    assert is_short(check(comm, added, 'edf', create=lambda: optimizers.MomentumSGD(.1)))


def test_all_ranks_warn_of_gradients_that_are_not_finite(comm):
    with pytest.warns(UserWarning, match='Non finite number found in param.grad') as caught:
        optimizer = check(comm, [CLIPPING], is_scaled=True, spoiled=(2, comm.size - 1))
    assert is_short(optimizer)
    texts = [str(warning.message) for warning in caught]
    half = len(texts) // 2
    assert half > 0
    assert texts[:half] == texts[half:]  # without and with sharded states


def test_gradients_of_zero(comm):
    model = L.Linear(N_IN, N_OUT)
    optimizer = chainermn.create_multi_node_optimizer(
        optimizers.SGD(), comm, shard_states=True).setup(model)
    for hook in CLIPPING, LARS:
        optimizer.add_hook(hook())
    for _ in range(2):
        optimizer.update(lambda: F.sum(0 * model.W))
    assert optimizer.t == 1


class OwnClipping(hooks.GradientClipping):
    def __call__(self, optimizer):
        super().__call__(optimizer)


class OwnHooks(optimizers.Adam):
    def call_hook(self, hook):
        super().call_hook(hook)


@pytest.mark.parametrize('added, create', [
    ([CLIPPING, lambda: lambda optimizer: None], optimizers.Adam),
    ([lambda: OwnClipping(.01)], optimizers.Adam), ([CLIPPING], OwnHooks)],
    ids=['function', 'subclass', 'optimizer'])
def test_others_get_all_gradients(comm, added, create):
    optimizer = check(comm, added, create=create)
    assert not is_short(optimizer)


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
