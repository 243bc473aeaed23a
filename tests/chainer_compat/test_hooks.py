"""Hooks of functions, links and optimizers see what runs; without a GPU theirs say so."""

import io

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import function_hooks, link_hooks, optimizer_hooks

pytestmark = pytest.mark.mpi_skip

SMALL = {'f': 1e-5, 'd': 1e-9}


def train(times=2):
    link = L.Linear(3, 2)
    for _ in range(times):
        link.cleargrads()
        F.sum(F.tanh(link(np.ones((4, 3), 'f')))).backward()


def report(hook, **options):
    out = io.StringIO()
    hook.print_report(file=out, **options)
    names, *lines = out.getvalue().splitlines()
    return names.split(), {line.split()[0]: line.split()[1:] for line in lines}


def test_timer_of_functions():
    with function_hooks.TimerHook() as hook:
        train()
    assert all(time >= 0 for _, time in hook.call_history)
    # Those that run within others are in their time.
    assert 0 <= hook.total_time() <= sum(time for _, time in hook.call_history)
    summary = hook.summary()
    for name in ('LinearFunction', 'Tanh'):  # each forward and backward
        assert summary[name]['occurrence'] == 4
    names, lines = report(hook, unit='ms')
    assert names == ['FunctionName', 'ElapsedTime', 'Occurrence']
    assert lines['Tanh'][0].endswith('ms') and lines['Tanh'][1] == '4'


def test_timer_of_links():
    with link_hooks.TimerHook() as hook:
        train(3)
    assert hook.summary()['Linear']['occurrence'] == 3
    assert report(hook)[1]['Linear'][1] == '3'


def test_print_hook():
    out = io.StringIO()
    with function_hooks.PrintHook(file=out):
        train(1)
    said = out.getvalue()
    for line in ['function\tLinearFunction', 'function\tTanh', 'input data', 'output gradient']:
        assert line in said


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
