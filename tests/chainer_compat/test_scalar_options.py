"""Options can be NumPy scalars: like Python numbers, they change no dtype.

``test_every_function.py`` tests the functions.
"""

import inspect

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer import initializers, optimizer_hooks, optimizers

pytestmark = pytest.mark.mpi_skip

# With NumPy 2, an array of the first type and a scalar of the second give an array of the second.
TYPES = [('e', np.float32), ('f', np.float64)]


def float_options(function):
    return {name: parameter.default for name, parameter
            in inspect.signature(function).parameters.items() if type(parameter.default) is float}


OPTIMIZERS = [optimizer for _, optimizer in inspect.getmembers(optimizers, inspect.isclass)
              if issubclass(optimizer, chainer.optimizer.GradientMethod)]


def updated(optimizer, dtype, *hooks):
    """Return the parameter and the state of an optimizer after two updates."""
    link = chainer.Link()
    with link.init_scope():
        link.x = chainer.Parameter(np.arange(1, 4).astype(dtype))
    optimizer.setup(link)
    for hook in hooks:
        optimizer.add_hook(hook)
    for _ in range(2):
        link.x.grad = np.ones(3, dtype)
        optimizer.update()
    return [link.x.array, *(x for _, x in sorted(link.x.update_rule.state.items()))]


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_allclose(a, b, 2e-2 if np.asarray(a).dtype == 'e' else 1e-4, 1e-4)


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_optimizers(optimizer):
    options = float_options(optimizer)
    assert options
    if 'eps' in options:
        options['eps'] = 1e-4  # the defaults are 0 in float16
    for dtype, scalar in TYPES:
        expected = updated(optimizer(**options), dtype)
        assert expected[0].dtype == dtype
        converted = {name: scalar(x) for name, x in options.items()}
        assert_same(updated(optimizer(**converted), dtype), expected)
        later = optimizer()
        for name, x in converted.items():
            setattr(later, name, x)
        assert_same(updated(later, dtype), expected)


@pytest.mark.parametrize('hook', [
    lambda x: optimizer_hooks.WeightDecay(x(.1)),
    lambda x: optimizer_hooks.Lasso(x(.1)),
    lambda x: optimizer_hooks.GradientClipping(x(.1)),
    lambda x: optimizer_hooks.GradientHardClipping(x(-.1), x(.1)),
    lambda x: optimizer_hooks.GradientLARS(x(.01), x(.1), x(1e-4)),
    lambda x: optimizer_hooks.GradientNoise(x(.1), lambda *_: 1),
])
def test_hooks(hook):
    for dtype, scalar in TYPES:
        expected = updated(optimizers.SGD(), dtype, hook(float))
        assert_same(updated(optimizers.SGD(), dtype, hook(scalar)), expected)


@pytest.mark.parametrize('name', [
    'Constant', 'GlorotNormal', 'GlorotUniform', 'HeNormal', 'HeUniform', 'Identity',
    'LeCunNormal', 'LeCunUniform', 'Normal', 'Orthogonal', 'Uniform'])
def test_initializers(name):
    for dtype, scalar in TYPES:
        initializer = getattr(initializers, name)(scalar(1.1))
        assert initializers.generate_array(initializer, (4, 4), np, dtype).dtype == dtype


@pytest.mark.parametrize('link', [
    lambda x: L.BatchNormalization(4, x(.9), x(1e-4)),
    lambda x: L.BatchRenormalization(4, x(1.5), x(.5), x(.9), x(1e-4)),
    lambda x: L.GroupNormalization(2, eps=x(1e-4)),
    lambda x: L.LayerNormalization(4, x(1e-4)),
    lambda x: L.PReLU((), x(.2)),
    lambda x: L.SimplifiedDropconnect(4, 2, ratio=x(.5)),
    lambda x: L.StatefulZoneoutLSTM(4, 4, c_ratio=x(.5), h_ratio=x(.5)),
    lambda x: L.Swish((), x(1.)),
    lambda x: L.Linear(4, 2, initialW=x(.5), initial_bias=x(.5)),
])
@pytest.mark.parametrize('train', [True, False])
def test_links(link, train):
    for dtype, numpy_scalar in TYPES:
        found = []
        for scalar in [float, numpy_scalar]:
            with chainer.using_config('dtype', np.dtype(dtype)), \
                    chainer.using_config('train', train):
                model = link(scalar)
                x = chainer.Variable(np.random.RandomState(0).randn(3, 4).astype(dtype))
                y = model(x)
                y.grad = np.ones_like(y.array)
                y.backward()
            persistent = [vars(model)[name] for name in sorted(model._persistent)]
            found.append([np.asarray(a).dtype for a in [
                y.array, x.grad, *(p.grad for p in model.params()), *persistent]])
        assert found[0][0] == dtype
        assert found[1] == found[0]
