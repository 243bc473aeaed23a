"""Formulas without temporary arrays have the bits of Chainer's rules."""

import inspect
import itertools
import tracemalloc

import chainer
import numpy as np
import pytest
from chainer import optimizers

from chainer_compat import block_updates, update_formulas, updates

pytestmark = pytest.mark.mpi_skip

OPTIMIZERS = {
    'SGD': lambda: optimizers.SGD(.1),
    'MomentumSGD': lambda: optimizers.MomentumSGD(.1, .8),
    'Adam': lambda: optimizers.Adam(.01),
    'AdamW': lambda: optimizers.AdamW(.01, weight_decay_rate=.1, eta=.5),
    'AMSGrad': lambda: optimizers.AMSGrad(.01),
    'integers': lambda: optimizers.Adam(1, beta1=0, eps=1, eta=2),
    'no step': lambda: optimizers.MomentumSGD(0, 1),
    'no eps': lambda: optimizers.Adam(.01, eps=0.),
}


def with_number(optimizer, name, value):
    """Set a number with a dtype of its own, with which Chainer computes."""
    vars(optimizer.hyperparam)[name] = value  # an assignment would convert it
    return optimizer


OTHERS = {
    'float64': lambda: with_number(optimizers.SGD(), 'lr', np.float64(.1)),
    'float32': lambda: with_number(optimizers.MomentumSGD(.1), 'momentum', np.float32(.8)),
    'step of float64': lambda: with_number(optimizers.Adam(), 'alpha', np.float64(.1)),
    'array': lambda: with_number(optimizers.SGD(), 'lr', np.array(.1, 'd')),
    'bool': lambda: optimizers.Adam(.01, beta1=False),
    'AdaBound': lambda: optimizers.AdaBound(),
    'RMSprop': lambda: optimizers.RMSprop(),
}
BLOCK = 1 << 12  # smaller than that of the package, for speed
SHAPES = [(3, 4), (), (BLOCK + 5,), (7,), (0, 3), (2, BLOCK), (BLOCK // 2 - 1,), (300, 20)]


@pytest.fixture(autouse=True)
def _options(monkeypatch):
    monkeypatch.setattr(chainer.global_config, 'use_torch', 'never')
    monkeypatch.setattr(block_updates, 'BLOCK_OF_FORMULA', BLOCK)


def train(make, dtype, special, changes=()):
    random = np.random.RandomState(0)
    model = chainer.Chain()
    with model.init_scope():
        for i, shape in enumerate(SHAPES):
            setattr(model, f'p{i}', chainer.Parameter(
                np.asarray(random.normal(size=shape), dtype)))
    optimizer = make().setup(model)
    for n in range(4):
        for param in model.params():
            grad = np.asarray(random.normal(size=param.shape), dtype)
            if special and n == 2 and grad.size > 9:
                grad.flat[:9] = [np.nan, np.inf, -np.inf, 0, -0., 1e-45, -1e-40, 3e38, -np.nan]
            param.grad = grad
        for name, value in changes if n == 2 else ():
            setattr(optimizer.hyperparam, name, value)
        with np.errstate(all='ignore'):
            optimizer.update()
    return [array.tobytes() for param in model.params()
            for array in (param.array, *param.update_rule.state.values())]


def as_chainer(monkeypatch, make, *args):
    """Train with the rule of each parameter, and its original method."""
    rule = type(make().create_update_rule())
    with monkeypatch.context() as patch:
        patch.setattr(updates, 'update', lambda params, _: [param.update() for param in params])
        patch.setattr(rule, 'update_core_cpu', inspect.unwrap(rule.update_core_cpu))
        return train(make, *args)


@pytest.mark.parametrize('name', [*OPTIMIZERS, *OTHERS])
def test_the_bits_of_chainer(name, monkeypatch):
    make = {**OPTIMIZERS, **OTHERS}[name]
    for dtype, special in itertools.product('fd', (False, True)):
        found = train(make, dtype, special)
        assert found == as_chainer(monkeypatch, make, dtype, special), (dtype, special)


CHANGES = {'lr': .01, 'momentum': 0., 'alpha': .5, 'eta': 1.5, 'eps': 1e-3, 'beta2': .9,
           'weight_decay_rate': .3, 'amsgrad': False}


@pytest.mark.parametrize('name', ['MomentumSGD', 'Adam', 'AMSGrad'])
def test_pairs_of_changes(name, monkeypatch):
    make = OPTIMIZERS[name]
    known = [key for key in CHANGES if hasattr(make().hyperparam, key)]
    for pair in itertools.combinations(known, 2):
        changes = [(key, CHANGES[key]) for key in pair]
        found = train(make, 'f', False, changes)
        assert found == as_chainer(monkeypatch, make, 'f', False, changes), pair


@pytest.mark.parametrize('name', [*OPTIMIZERS, *OTHERS])
def test_which_rules_have_a_formula(name):
    found = []
    original = update_formulas.find

    def find(rule, dtype):
        found.append(original(rule, dtype))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update_formulas, 'find', find)
        train({**OPTIMIZERS, **OTHERS}[name], 'f', False)
    assert found or name in ('array', 'float32')  # for which parameters are not grouped
    assert {each is not None for each in found} <= {name in OPTIMIZERS}


@pytest.mark.parametrize('name', ['SGD', 'MomentumSGD', 'Adam', 'AMSGrad'])
def test_few_allocations(name, monkeypatch):
    """Intermediate results need a part of one block, however large the parameter is."""
    model = chainer.Link()
    with model.init_scope():
        model.p = chainer.Parameter(np.zeros(100 * BLOCK, 'f'))
    model.p.grad = np.ones_like(model.p.array)
    optimizer = OPTIMIZERS[name]().setup(model)
    for _ in range(2):
        optimizer.update()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        optimizer.update()
        assert tracemalloc.get_traced_memory()[1] - before < 2 * 4 * BLOCK
    finally:
        tracemalloc.stop()
