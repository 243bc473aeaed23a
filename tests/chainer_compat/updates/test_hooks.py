"""Hooks of links and optimizers compute correct results; GPU hooks need CuPy."""

import itertools

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import function_hooks, optimizer_hooks
from each_case import each_case

from chainer_compat.updates.gradient_memory import own

pytestmark = pytest.mark.mpi_skip


@pytest.mark.parametrize('hook', ['CUDAProfileHook', 'CupyMemoryProfileHook'])
@pytest.mark.skipif(chainer.backends.cuda.available, reason='is for machines without CuPy')
def test_gpu_hooks_say_why_not(hook):
    with pytest.raises(RuntimeError, match='CUDA environment is not correctly set up'):
        getattr(function_hooks, hook)()


def norm(x):
    return np.sqrt((x ** 2).sum())


class HardClipping(optimizer_hooks.GradientHardClipping):
    """A hook of a program, which replaces the gradient instead of changing it."""

    def __call__(self, rule, param):
        param.grad = np.clip(param.grad, self.lower_bound, self.upper_bound)


class OfVariable(HardClipping):
    def __call__(self, rule, param):
        param.grad_var.array = np.clip(param.grad, self.lower_bound, self.upper_bound)


#: Hooks, and what they do with lists of parameters and gradients.
HOOKS = [
    (optimizer_hooks.WeightDecay(.1), lambda ps, gs: [
        g + .1 * p for p, g in zip(ps, gs, strict=True)]),
    (optimizer_hooks.Lasso(.1), lambda ps, gs: [
        g + .1 * np.sign(p) for p, g in zip(ps, gs, strict=True)]),
    (optimizer_hooks.GradientClipping(.5), lambda ps, gs: [
        g * min(1, .5 / np.sqrt(sum((g ** 2).sum() for g in gs))) for g in gs]),
    *((hook(-.02, .03), lambda ps, gs: [np.clip(g, -.02, .03) for g in gs])
      for hook in (optimizer_hooks.GradientHardClipping, HardClipping, OfVariable)),
    (optimizer_hooks.GradientLARS(weight_decay=.1), lambda ps, gs: [
        (g + .1 * p) * norm(p) / (1e-9 + norm(g) + .1 * norm(p))
        for p, g in zip(ps, gs, strict=True)]),
    (optimizer_hooks.GradientNoise(0., lambda xp, shape, *_: xp.full(shape, .25)),
     lambda ps, gs: [g + .25 for g in gs]),
]


@each_case('kind, of_rule, scale, use_torch', itertools.product(
    range(len(HOOKS)), [False, True], [None, 64.], ['auto', 'never']))
def test_optimizer_hooks(kind, of_rule, scale, use_torch):
    """They change one gradient each, although W + V + x gives three variables the same array."""
    hook, change = HOOKS[kind]
    if of_rule and isinstance(hook, optimizer_hooks.GradientClipping):
        return
    random = np.random.RandomState(0)
    link = chainer.Link()
    with link.init_scope():
        link.W, link.V = (chainer.Parameter(random.standard_normal((3, 4)).astype('f'))
                          for _ in range(2))
        link.flipped = chainer.Parameter(random.standard_normal((3, 1)).astype('f')[:, ::-1])
    x, w = (random.standard_normal((3, 4)).astype('f') for _ in range(2))
    x = chainer.Variable(x)
    optimizer = chainer.optimizers.SGD(.5).setup(link)
    for rule in [param.update_rule for param in link.params()] if of_rule else [optimizer]:
        rule.add_hook(hook, 'hook')
    if scale is not None:
        optimizer.loss_scaling(scale=scale)
    before = [link.W.array.copy(), link.V.array.copy(), link.flipped.array.copy()]
    gradients = [w, w, np.full((3, 1), .1)]
    with chainer.using_config('use_torch', use_torch):
        # The gradients of F.sum and of its input are read-only.
        optimizer.update(
            lambda: F.sum((link.W + link.V + x) * w) + F.sum(link.flipped) * np.float32(.1))
    for param, p, g in zip([link.W, link.V, link.flipped], before, change(before, gradients),
                           strict=True):
        np.testing.assert_allclose(param.array, p - .5 * g, 1e-4, 1e-6)
    np.testing.assert_allclose(x.grad, w * (scale or 1), 1e-6)


def test_hooks_of_float16_keep_small_gradients():
    """A gradient of 2**-26 is zero in float16 without the loss scale."""
    link = chainer.Link()
    with link.init_scope():
        link.p = chainer.Parameter(np.zeros(3, 'e'))
    optimizer = chainer.optimizers.SGD(2. ** 20)
    optimizer.use_fp32_update()
    optimizer.setup(link).loss_scaling(scale=2. ** 10)
    for hook in optimizer_hooks.WeightDecay(.1), optimizer_hooks.GradientClipping(1.):
        optimizer.add_hook(hook)
    optimizer.add_hook(optimizer_hooks.GradientHardClipping(-100., 100.))
    link.p.grad, link.p._loss_scale = np.full(3, 2. ** -16, 'e'), 2. ** 10
    optimizer.update()
    np.testing.assert_allclose(link.p.array, -2. ** -6)


def addresses(params):
    return [param.grad.__array_interface__['data'][0] for param in params]


def test_gradients_that_nothing_shares_are_not_copied():
    """Also those of an LSTM, which PyTorch computes in parts of one storage."""
    lstm, linear = L.NStepLSTM(1, 3, 4, 0), L.Linear(4, 2)
    params = [linear.W, lstm[0].w0, lstm[0].w7]

    def backward():
        for link in lstm, linear:
            link.cleargrads()
        F.sum(linear(lstm(None, None, [np.ones((5, 3), 'f')])[0][0]) ** 2).backward()

    backward()
    before = addresses(params)
    own([*lstm.params(), *linear.params()])
    assert addresses(params) == before


def test_gradients_in_a_buffer_that_the_program_keeps_are_copied():
    buffer = bytearray(np.ones(3, 'f').tobytes())
    param = chainer.Parameter(np.zeros(3, 'f'))
    param.grad = np.frombuffer(buffer, 'f')
    own([param])
    param.grad *= 2
    np.testing.assert_array_equal(np.frombuffer(buffer, 'f'), np.ones(3))


@pytest.mark.parametrize('other', ['tensor', 'part', 'array', 'view'])
def test_gradients_in_a_storage_that_others_use_are_copied(other):
    torch = pytest.importorskip('torch')
    tensor = torch.ones(2, 3)
    params = [chainer.Parameter(np.zeros(3, 'f')) for _ in range(2)]
    for param, row in zip(params, tensor, strict=True):
        param.grad = row.numpy()
    del row
    kept = {'tensor': tensor, 'part': tensor[:, 0], 'array': tensor.numpy(),
            'view': params[1].grad[:2]}[other]
    del tensor
    own(params)
    for param in params:
        param.grad *= 2
    assert np.asarray(kept).max() == 1
    np.testing.assert_array_equal([param.grad for param in params], np.full((2, 3), 2))
