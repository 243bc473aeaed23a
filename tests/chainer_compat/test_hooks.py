"""Hooks of links and optimizers compute what they say; without a GPU theirs say so."""


import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import function_hooks, link_hooks, optimizer_hooks

pytestmark = pytest.mark.mpi_skip


@pytest.mark.parametrize('hook', ['CUDAProfileHook', 'CupyMemoryProfileHook'])
@pytest.mark.skipif(chainer.backends.cuda.available, reason='is for machines without CuPy')
def test_gpu_hooks_say_why_not(hook):
    with pytest.raises(RuntimeError, match='CUDA environment is not correctly set up'):
        getattr(function_hooks, hook)()


def test_spectral_normalization():
    np.random.seed(0)
    link = L.Linear(4, 3).add_hook(link_hooks.SpectralNormalization(n_power_iteration=30))
    weights = link.W.array.copy()
    x = np.random.standard_normal((5, 4)).astype('f')
    y = link(x)
    sigma = np.linalg.svd(weights)[1][0]
    np.testing.assert_allclose(y.array, x @ weights.T / sigma, 1e-4, 1e-5)
    F.sum(y).backward()
    assert link.W.grad.shape == weights.shape


def test_weight_standardization():
    np.random.seed(0)
    link = L.Convolution2D(2, 3, 3).add_hook(link_hooks.WeightStandardization(eps=1e-7))
    rows = link.W.array.reshape(3, -1).copy()
    x = np.random.standard_normal((1, 2, 3, 3)).astype('f')
    y = link(x).array.ravel()
    rows = (rows - rows.mean(1, keepdims=True)) / rows.std(1, keepdims=True)
    np.testing.assert_allclose(y, rows @ x.ravel(), 1e-3, 1e-3)


@pytest.mark.parametrize(('hook', 'change'), [
    (optimizer_hooks.WeightDecay(.1), lambda p, g: g + .1 * p),
    (optimizer_hooks.Lasso(.1), lambda p, g: g + .1 * np.sign(p)),
    (optimizer_hooks.GradientClipping(.5), lambda p, g: g * min(1, .5 / np.sqrt((g ** 2).sum()))),
    (optimizer_hooks.GradientHardClipping(-.2, .3), lambda p, g: np.clip(g, -.2, .3)),
], ids=lambda x: type(x).__name__)
def test_optimizer_hooks(hook, change):
    random = np.random.RandomState(0)
    link = chainer.Link()
    with link.init_scope():
        link.p = chainer.Parameter(random.standard_normal((3, 4)).astype('f'))
    link.p.grad = random.standard_normal((3, 4)).astype('f')
    before, gradient = link.p.array.copy(), link.p.grad.copy()
    optimizer = chainer.optimizers.SGD(.5).setup(link)
    optimizer.add_hook(hook)
    optimizer.update()
    np.testing.assert_allclose(link.p.array, before - .5 * change(before, gradient), 1e-4, 1e-6)


def test_gradient_noise():
    link = L.Linear(100, 100, initialW=0)
    link.cleargrads()
    link.W.grad, link.b.grad = np.zeros((100, 100), 'f'), np.zeros(100, 'f')
    optimizer = chainer.optimizers.SGD(1).setup(link)
    optimizer.add_hook(optimizer_hooks.GradientNoise(.09))
    np.random.seed(0)
    optimizer.update()
    assert link.W.array.dtype == 'f'
    assert link.W.array.std() == pytest.approx(.3, rel=.05)
