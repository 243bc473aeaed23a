"""An optimizer on the store against the same one on the whole model."""

import chainer
import numpy as np
import pytest
from chainer import optimizer_hooks as hooks
from chainer import optimizers

from chainermn.kvstore import _updaters
from chainermn.kvstore._updaters import OptimizerUpdater

OPTIMIZERS = {
    'SGD': lambda: optimizers.SGD(.1),
    'MomentumSGD': lambda: optimizers.MomentumSGD(.1, .9),
    'CorrectedMomentumSGD': lambda: optimizers.CorrectedMomentumSGD(.1, .9),
    'NesterovAG': lambda: optimizers.NesterovAG(.1, .9),
    'AdaGrad': lambda: optimizers.AdaGrad(.1),
    'AdaDelta': lambda: optimizers.AdaDelta(),
    'Adam': lambda: optimizers.Adam(.1),
    'AMSGrad': lambda: optimizers.Adam(.1, amsgrad=True),
    'AdamW': lambda: optimizers.Adam(.1, weight_decay_rate=.01),
    'RMSprop': lambda: optimizers.RMSprop(.1),
    'RMSpropGraves': lambda: optimizers.RMSpropGraves(.1),
    'SMORMS3': lambda: optimizers.SMORMS3(.1),
    'MSVAG': lambda: optimizers.MSVAG(.1),
}
STEPS = 4


def gradient(step, shape=(5, 3), dtype=np.float32):
    return (np.random.RandomState(step).randn(*shape) / 2).astype(dtype)


def one_process(optimizer, scale=1, dtype=np.float32, add=()):
    """The parameter after some steps in which the gradient is ``scale`` times as large."""
    model = chainer.Link()
    with model.init_scope():
        model.w = chainer.Parameter(gradient(99, dtype=dtype))
    optimizer.setup(model)
    for hook in add:
        optimizer.add_hook(hook)
    for step in range(STEPS):
        model.w.grad = gradient(step, dtype=dtype) * dtype(scale)
        optimizer.update()
    return model.w.array


@pytest.mark.parametrize('bound', [1_000_000, 1], ids=['whole', 'cut'])
@pytest.mark.parametrize('type', ['local', 'dist_sync'])
def test_steps_as_in_one_process(create, type, bound):
    for name, make in OPTIMIZERS.items():
        kv = create(type, bigarray_bound=bound)
        kv.init('/w', gradient(99))
        kv.set_optimizer(make())
        for step in range(STEPS):
            kv.push('/w', gradient(step))
        # The sum of n equal float32 numbers, n up to 4, is exact but for 3.
        np.testing.assert_allclose(kv.pull('/w'), one_process(make(), kv.num_workers), rtol=1e-4,
                                   atol=1e-5, err_msg=name)


def test_rescales(create):
    kv = create('dist_sync')
    kv.init('/w', gradient(99))
    kv.set_optimizer(optimizers.Adam(.1), rescale_grad=1 / kv.num_workers)
    for step in range(STEPS):
        kv.push('/w', gradient(step))
    np.testing.assert_allclose(kv.pull('/w'), one_process(optimizers.Adam(.1)), rtol=1e-5)


@pytest.mark.parametrize('add', [
    [hooks.WeightDecay(.1)], [hooks.Lasso(.1)], [hooks.GradientHardClipping(-.1, .1)],
    [hooks.WeightDecay(.1), hooks.GradientHardClipping(-.1, .1)], [hooks.GradientLARS()]],
    ids=lambda add: '+'.join(type(hook).__name__ for hook in add))
def test_hooks(create, add):
    """Of one parameter; an array is not cut for those that look at all of its elements."""
    model = chainer.Link()
    with model.init_scope():
        model.w = chainer.Parameter(np.full((5, 3), 7, np.float32))
    optimizer = optimizers.MomentumSGD(.1).setup(model)
    for hook in add:
        optimizer.add_hook(hook)
    kv = create('dist_sync', bigarray_bound=1)
    kv.set_optimizer(optimizer)
    kv.init('/w', gradient(99))
    is_elementwise = not isinstance(add[0], hooks.GradientLARS)
    assert kv._layouts['/w'].is_cut == (is_elementwise and kv.num_workers > 1)
    for step in range(STEPS):
        kv.push('/w', gradient(step))
    expected = one_process(optimizers.MomentumSGD(.1), kv.num_workers, add=add)
    np.testing.assert_allclose(kv.pull('/w'), expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(model.w.array, np.full((5, 3), 7))  # is not touched


def test_float32_update_of_float16(create):
    def make():
        optimizer = optimizers.MomentumSGD(.001)
        optimizer.use_fp32_update()
        return optimizer

    kv = create('local')
    kv.init('/w', gradient(99, dtype=np.float16))
    kv.set_optimizer(make())
    for step in range(STEPS):
        kv.push('/w', gradient(step, dtype=np.float16))
    found = kv.pull('/w')
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, one_process(make(), dtype=np.float16))


def test_a_changed_hyperparameter_counts(create):
    optimizer = optimizers.SGD(.5)
    kv = create('dist_sync')
    kv.init(0, np.zeros(3))
    kv.set_optimizer(optimizer, 1 / kv.num_workers)
    kv.push(0, np.ones(3))
    optimizer.lr = .25
    kv.push(0, np.ones(3))
    np.testing.assert_array_equal(kv.pull(0), np.full(3, -.75))


def set_up(*add):
    optimizer = optimizers.SGD().setup(chainer.links.Linear(2, 2))
    for hook in add:
        optimizer.add_hook(hook)
    return optimizer


def test_refuses_hooks_for_the_whole_model(kv, same_error):
    error = same_error(kv.set_optimizer, set_up(hooks.GradientClipping(1)))
    assert isinstance(error, ValueError)
    assert 'needs all parameters at once' in str(error) and 'update_on_kvstore=False' in str(error)


@pytest.mark.mpi(min_size=2)
def test_refuses_to_cut_late(create, same_error):
    kv = create('dist_sync', bigarray_bound=6)
    kv.init(['a', 'b'], [np.zeros((3, 2)), np.zeros(3)])
    error = same_error(kv.set_optimizer, set_up(hooks.GradientLARS()))
    assert isinstance(error, ValueError)
    assert "parts of 'a': float64 (3, 2)" in str(error) and "'b'" not in str(error)


@pytest.mark.mpi(min_size=2)
def test_refuses_different_optimizers(dist, same_error, comm):
    for make in (lambda: optimizers.SGD(comm.rank + 1),
                 lambda: optimizers.SGD() if comm.rank else optimizers.Adam()):
        error = same_error(dist.set_optimizer, make())
        assert isinstance(error, ValueError)
        assert 'do not call the same' in str(error)


def test_is_elementwise():
    assert OptimizerUpdater(optimizers.Adam()).is_elementwise
    assert OptimizerUpdater(set_up(hooks.WeightDecay(1))).is_elementwise
    assert not OptimizerUpdater(set_up(hooks.GradientLARS())).is_elementwise

    class Rule(optimizers.sgd.SGDRule):
        is_elementwise = False

    class Mine(optimizers.SGD):
        def create_update_rule(self):
            return Rule(self.hyperparam)

    assert not OptimizerUpdater(Mine()).is_elementwise


def test_plain_description():
    described = _updaters.describe(optimizers.SGD(np.float32(.5)))
    assert described == {'optimizer': 'chainer.optimizers.sgd.SGD', 'hyperparameters': {'lr': .5}}
