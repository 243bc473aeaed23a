"""Optimizers, and the training of a model with parameters of many sizes."""

import contextlib

import chainer
import numpy as np
from chainer import optimizers

from chainer_compat.updates import block_updates, one_pass


def with_number(optimizer, name, value):
    """Set a hyperparameter to a number with its own dtype, which Chainer uses as it is."""
    vars(optimizer.hyperparam)[name] = value  # setattr would convert it
    return optimizer


#: Optimizers whose updates NumPy computes without temporary arrays.
WITH_FORMULA = {
    'SGD': lambda: optimizers.SGD(.1),
    'MomentumSGD': lambda: optimizers.MomentumSGD(.1, .8),
    'no momentum': lambda: optimizers.MomentumSGD(.1, 0),
    'no step': lambda: optimizers.MomentumSGD(0, 1),
    'Adam': lambda: optimizers.Adam(.01, eps=1e-3),  # where eps matters
    'no beta': lambda: optimizers.Adam(.1, beta1=0, beta2=0, eps=1e-3),
    'integers': lambda: optimizers.Adam(1, beta1=0, eps=1, eta=2),
    'no eps': lambda: optimizers.Adam(.01, eps=0.),
    'AdamW': lambda: optimizers.AdamW(.01, weight_decay_rate=.1, eta=.5),
    'no rate': lambda: optimizers.AdamW(0, weight_decay_rate=.1),
    'AMSGrad': lambda: optimizers.AMSGrad(.01),
}
OTHERS = {
    'NesterovAG': lambda: optimizers.NesterovAG(.1),
    'CorrectedMomentumSGD': lambda: optimizers.CorrectedMomentumSGD(.1),
    'AdaGrad': lambda: optimizers.AdaGrad(.1),
    'AdaDelta': optimizers.AdaDelta,
    'RMSprop': lambda: optimizers.RMSprop(eps=1e-3),
    'RMSpropGraves': optimizers.RMSpropGraves,
    'AdaBound': optimizers.AdaBound,
    'AMSBound': optimizers.AMSBound,
    'MSVAG': optimizers.MSVAG,  # updates each parameter separately
    'SMORMS3': optimizers.SMORMS3,
    'float64': lambda: with_number(optimizers.SGD(), 'lr', np.float64(.1)),
    'float32': lambda: with_number(optimizers.MomentumSGD(.1), 'momentum', np.float32(.8)),
    'step of float64': lambda: with_number(optimizers.Adam(), 'alpha', np.float64(.1)),
    'array': lambda: with_number(optimizers.SGD(), 'lr', np.array(.1, 'd')),
    'bool': lambda: optimizers.Adam(.01, beta1=False),
}
OPTIMIZERS = WITH_FORMULA | OTHERS
#: Optimizers for which PyTorch's kernels convert some of the numbers.
UNUSUAL = {
    'no step', 'integers', 'no eps', 'float64', 'float32', 'step of float64', 'array', 'bool'}
BLOCK = 1 << 12  # smaller than the package's block size, for speed
SHAPES = [(3, 4), (), (1,), (7,), (BLOCK + 3,), (2, BLOCK // 2), (5, 1, 2), (4, 4), (3, 4)]
SPECIAL = [np.nan, np.inf, -np.inf, 0, -0., 1e-45, -1e-40, 3e38, -np.nan]


def step(model, optimizer, random, special=False):
    """Update with random gradients."""
    scale = optimizer._loss_scale or 1
    for param in model.params():
        param.grad = np.asarray(scale * random.normal(size=param.shape), param.dtype)
        if special and param.size > 9:
            with np.errstate(over='ignore'):
                param.grad.flat[:9] = SPECIAL
        param._loss_scale = optimizer._loss_scale
    with np.errstate(all='ignore'):
        optimizer.update()


def train(name, change=None, dtype='f', later=lambda model, optimizer: None, special=False):
    """Return all parameters, states and numbers of updates.

    Args:
        name: The optimizer.
        change: Function that is called before the first step; it may return another optimizer.
        dtype: The dtype of the parameters.
        later: Function that is called before the third of four steps.
        special: Whether the last two steps have non-finite and very small gradients.
    """
    random = np.random.RandomState(0)
    model = chainer.Chain()
    with model.init_scope():
        for i, shape in enumerate(SHAPES):
            setattr(model, f'p{i}', chainer.Parameter(np.asarray(random.normal(size=shape), dtype)))
    optimizer = OPTIMIZERS[name]().setup(model)
    optimizer = (change and change(model, optimizer)) or optimizer
    model = optimizer.target
    for n in range(4):
        if n == 2:
            later(model, optimizer)
        step(model, optimizer, random, special and n >= 2)
    found = []
    for param in model.params():
        rule = param.update_rule
        found.append(param.array)
        if rule:
            found += [*(rule.state or {}).values(), rule.t]
    return found


def update_each(params, is_repeated=False):
    for param in params:
        param.update()


@contextlib.contextmanager
def one_by_one(monkeypatch):
    """Update like Chainer: call the rule of each parameter, with whole arrays."""
    with monkeypatch.context() as patch:
        patch.setattr(one_pass, 'update', update_each)
        patch.setattr(block_updates, 'BLOCK', 1 << 40)
        with chainer.using_config('fused_updates', False):
            yield


def assert_same_bits(found, expected):
    for x, y in zip(found, expected, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
