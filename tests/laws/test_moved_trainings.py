"""A law of training that moves to PyTorch and back: it continues as in Chainer."""

import dataclasses
import warnings

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import optimizer_hooks, optimizers
from hypothesis import strategies as st
from laws.law import law, planted

import chainer_compat

torch = pytest.importorskip('torch')
from trainings_in_torch import assert_same, train, train_in_torch  # noqa: E402

from chainer_compat.pytorch.conversion import optimizers as moved  # noqa: E402

pytestmark = pytest.mark.mpi_skip

#: The range of each hyperparameter, by optimizer.
KINDS = {
    'SGD': {'lr': (.01, .1)},
    'MomentumSGD': {'lr': (.01, .05), 'momentum': (.1, .95)},
    'CorrectedMomentumSGD': {'lr': (.01, .05), 'momentum': (.1, .95)},
    'NesterovAG': {'lr': (.01, .05), 'momentum': (.1, .95)},
    'Adam': {'alpha': (.001, .02), 'beta1': (.5, .95), 'beta2': (.9, .999), 'eps': (1e-4, 1e-2),
             'eta': (.5, 1.)},
    'AdamW': {'alpha': (.001, .02), 'eps': (1e-4, 1e-2), 'weight_decay_rate': (1e-3, .1)},
    'AMSGrad': {'alpha': (.001, .02), 'beta2': (.9, .999), 'eps': (1e-4, 1e-2)},
    'AdaGrad': {'lr': (.01, .1), 'eps': (1e-4, 1e-2)},
    'AdaDelta': {'rho': (.5, .95), 'eps': (1e-4, 1e-2)},
    'RMSprop': {'lr': (.001, .01), 'alpha': (.8, .99), 'eps': (1e-3, 1e-2)},
}
#: The learning rates that may change after the move, by optimizer.
RATES = {'SGD': 'lr', 'NesterovAG': 'lr', 'CorrectedMomentumSGD': 'lr', 'AdaGrad': 'lr',
         'RMSprop': 'lr', 'Adam': 'alpha', 'AMSGrad': 'alpha'}
HOOKS = {
    'decay': lambda rate: optimizer_hooks.WeightDecay(rate),
    'clip': lambda rate: optimizer_hooks.GradientClipping(10 * rate),
    'hard clip': lambda rate: optimizer_hooks.GradientHardClipping(-5 * rate, 8 * rate),
    'lasso': lambda rate: optimizer_hooks.Lasso(rate / 10),
}
NAMES = 'conv/W', 'conv/b', 'norm/gamma', 'norm/beta', 'fc/W', 'fc/b'


@dataclasses.dataclass(frozen=True)
class Training:
    seed: int
    kind: str
    numbers: tuple[float, ...]
    hooks: tuple[tuple[str, float], ...]
    frozen: tuple[str, ...]
    own: tuple[tuple[str, float], ...]
    steps: tuple[int, int, int]
    factor: float


@st.composite
def trainings(draw):
    kind = draw(st.sampled_from([*KINDS]))
    part = st.floats(0, 1).map(lambda x: round(x, 3))
    name = st.sampled_from(NAMES)
    hooks = draw(st.lists(st.tuples(st.sampled_from([*HOOKS]), part), max_size=3,
                          unique_by=lambda hook: hook[0]))
    return Training(
        draw(st.integers(0, 10 ** 6)), kind, tuple(draw(part) for _ in KINDS[kind]), tuple(hooks),
        tuple(draw(st.lists(name, max_size=2, unique=True))) if 'clip' not in dict(hooks) else (),
        tuple(draw(st.lists(st.tuples(name, part), max_size=2, unique_by=lambda own: own[0]))),
        tuple(draw(st.integers(0, 4)) for _ in range(3)), draw(st.sampled_from([1., .5, 2.])))


class Net(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope(), chainer.using_config('dtype', np.float64):
            self.conv, self.norm = L.Convolution2D(2, 3, 3, pad=1), L.BatchNormalization(3)
            self.fc = L.Linear(3, 2)

    def forward(self, x):
        return self.fc(F.mean(F.tanh(self.norm(F.tanh(self.conv(x)))), (2, 3)))


def optimizer_of(program, model):
    values = {name: low + part * (high - low) for (name, (low, high)), part in zip(
        KINDS[program.kind].items(), program.numbers, strict=True)}
    optimizer = getattr(optimizers, program.kind)(**values).setup(model)
    for name, part in program.hooks:
        optimizer.add_hook(HOOKS[name](.01 + part / 10))
    params = {path[1:]: param for path, param in model.namedparams()}
    for name, part in program.own:
        hyperparam = params[name].update_rule.hyperparam
        own, (low, high) = next(iter(KINDS[program.kind].items()))
        setattr(hyperparam, own, low + part * (high - low))
    for name in program.frozen:
        params[name].update_rule.enabled = False
    return optimizer


def batches(random, n):
    return [(random.randn(4, 2, 3, 3), random.randint(0, 2, 4)) for _ in range(n)]


@law(trainings(), planted(moved, '_set_state', lambda set_state: (
    lambda optimizer, kind, name, old, new: set_state(
        optimizer, kind._replace(factor=lambda _: 1.), name, old, new))), 12)
def test_moved_training(program):
    """``to_torch_optimizer`` and ``load_torch_optimizer`` continue like Chainer's optimizer."""
    random = np.random.RandomState(program.seed)
    np.random.seed(program.seed)
    before, after, back = (batches(random, n) for n in program.steps)
    model = Net()
    optimizer = optimizer_of(program, model)
    train(optimizer, before)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        module = chainer_compat.to_torch(model, random.randn(4, 2, 3, 3), train=True)
    new = chainer_compat.to_torch_optimizer(optimizer, module)
    if program.kind in RATES and not program.own:
        setattr(optimizer, RATES[program.kind],
                getattr(optimizer, RATES[program.kind]) * program.factor)
        for group in new.param_groups:
            group['lr'] *= program.factor
    train(optimizer, after)
    train_in_torch(module, new, after)
    assert_same(model, module, 1e-9)

    other = Net()
    returned = optimizer_of(program, other)
    returned.hyperparam.__dict__.update(optimizer.hyperparam.__dict__)
    chainer_compat.load_weights(other, module)
    chainer_compat.load_torch_optimizer(returned, new, module)
    train(returned, back)
    train_in_torch(module, new, back)
    assert_same(other, module, 1e-9)
