"""Updates in one pass are bitwise identical to separate updates, except with PyTorch.

The laws in ``tests/laws/test_updates.py`` compare the results.
"""

import chainer
import numpy as np
import pytest
from chainer import optimizers
from update_cases import (
    BLOCK,
    OPTIMIZERS,
    SHAPES,
    UNUSUAL,
    assert_same_bits,
    one_by_one,
    train,
)

from chainer_compat.updates import block_updates

pytestmark = pytest.mark.mpi_skip

FUSED = {'SGD', 'MomentumSGD', 'AdaGrad', 'Adam', 'AdamW', 'AMSGrad', 'no beta'}


@pytest.fixture(autouse=True)
def options(monkeypatch):
    monkeypatch.setattr(block_updates, 'BLOCK', BLOCK)
    # By default, small updates do not import PyTorch.
    monkeypatch.setattr(chainer.global_config, 'fused_updates', True)


@pytest.mark.parametrize('name', sorted(OPTIMIZERS.keys() - UNUSUAL))
def test_which_rules_pytorch_updates(name, operators):
    with operators() as names:
        train(name)
    assert any(each.startswith('_fused') for each in names) == (name in FUSED)


@pytest.mark.parametrize('name', sorted(FUSED))
def test_pytorch_rounds_a_parameter_with_a_hook_equally(name):
    """A hook on one rank must not change the bits of its replica."""
    pytest.importorskip('torch')

    def hook(model, optimizer):
        for param in model.params():
            param.update_rule.add_hook(lambda rule, param: None, 'hook')

    def strides(model, optimizer):
        model.p0.array = np.asfortranarray(model.p0.array)

    expected = train(name, None)
    for change in hook, strides:
        assert_same_bits(train(name, change), expected)


@pytest.mark.parametrize(('option', 'value'), [('use_torch', 'never'), ('fused_updates', False)])
def test_switches(option, value, monkeypatch):
    with one_by_one(monkeypatch):
        expected = train('Adam', None)
    with chainer.using_config(option, value):
        found = train('Adam', None)
    assert_same_bits(found, expected)


@pytest.mark.parametrize('has_hook', [False, True])
def test_a_replaced_learning_rate_of_adam(has_hook, monkeypatch, kernels):
    model = chainer.links.Linear(3, 2)
    optimizer = optimizers.Adam().setup(model)
    if has_hook:
        model.W.update_rule.add_hook(lambda rule, param: None, 'hook')
    steps = []
    for rate in None, .5, 0.:
        if rate is not None:
            monkeypatch.setattr(type(model.W.update_rule), 'alpha_t', rate)
        before = model.W.array.copy()
        model.W.grad, model.b.grad = np.ones((2, 3), 'f'), np.ones(2, 'f')
        optimizer.update()
        steps.append(before - model.W.array)
    np.testing.assert_allclose(steps[0], .001, rtol=1e-3)  # alpha
    m, v = 1 - .9 ** 2, 1 - .999 ** 2  # after two gradients of 1
    np.testing.assert_allclose(steps[1], .5 * m / v ** .5, rtol=1e-5)
    assert not steps[2].any()


@pytest.mark.parametrize('option', ['auto', 'never'])
def test_what_an_update_reads_may_change_in_it(option, monkeypatch):
    """A learning rate that reads the state, or a gradient in its memory, as Chainer computes it."""
    random = np.random.RandomState(0)
    g = random.normal(size=(3, BLOCK)).astype('f')
    link = chainer.Link()
    with link.init_scope():
        link.p = chainer.Parameter(np.zeros(g.shape, 'f'))
    link.p.grad = g
    with chainer.using_config('use_torch', option), monkeypatch.context() as patches:
        patches.setattr(optimizers.adam.AdamRule, 'alpha_t',
                        property(lambda rule: float(rule.state['v'].max())))
        optimizers.Adam(eps=1.).setup(link).update()
        m, v = .1 * g, .001 * g ** 2
        np.testing.assert_allclose(link.p.array, -v.max() * m / (np.sqrt(v) + 1), 1e-4, 1e-9)
    with chainer.using_config('use_torch', option):
        optimizer = optimizers.AdaGrad(.1).setup(link)
        optimizer.update()
        before, h = link.p.array.copy(), g ** 2
        link.p.grad = link.p.update_rule.state['h']
        optimizer.update()
        h += h ** 2
        np.testing.assert_allclose(link.p.array, before - .1 * h / (np.sqrt(h) + 1e-8), 1e-4, 1e-6)


@pytest.mark.parametrize('option', ['auto', 'never'])
def test_floating_point_errors(option):
    """PyTorch ignores ``np.errstate``. Parameters before the one of the error are updated."""
    link = chainer.Link()
    with link.init_scope():
        link.a, link.b, link.c = (chainer.Parameter(np.zeros(3, 'f')) for _ in range(3))
    optimizer = optimizers.Adam().setup(link)
    large = np.full((1, 2), 1e30, 'f')
    for is_raised in False, True:
        for param, value in (link.a, 1), (link.b, 1e30 if is_raised else 1), (link.c, 1):
            param.grad = np.full(3, value, 'f')
        with chainer.using_config('use_torch', option), np.errstate(
                over='raise' if is_raised else 'warn'):
            if not is_raised:
                optimizer.update()
                continue
            for call in lambda: chainer.functions.square(large), optimizer.update:
                with pytest.raises(FloatingPointError):
                    call()
    assert [param.update_rule.t for param in (link.a, link.b, link.c)] == [2, 2, 1]
    np.testing.assert_allclose(link.a.array, -.002, 1e-3)
    np.testing.assert_allclose(link.c.array, -.001, 1e-3)


def test_few_calls_of_rules(sizes):
    """A step calls a rule once for all small parameters, and once for each block of the others."""
    with chainer.using_config('use_torch', 'never'):
        train('MomentumSGD', None)
    small = [n for n in map(np.prod, SHAPES) if 2 * n < BLOCK]
    large = [n for n in map(np.prod, SHAPES) if 2 * n >= BLOCK]
    assert len(small) > 4
    assert sizes == 4 * [BLOCK, 3, BLOCK, int(sum(small))]
    assert len(large) == 2


def test_code_of_the_program_is_called(monkeypatch):
    """A parameter or rule with methods of its own, and functions replaced in Chainer's classes."""
    class Twice(chainer.Parameter):
        grad = property(lambda self: 2 * self._grad, chainer.Parameter.grad.fset)

    class Model(chainer.Chain):
        def params(self):  # without the argument of Link.params
            return iter([self.a, self.b, self.c])

    model = Model()
    with model.init_scope():
        model.a, model.b = (chainer.Parameter(np.ones(3, 'f')) for _ in range(2))
        model.c = Twice(np.ones(3, 'f'))
    optimizer = optimizers.SGD(.25).setup(model)
    for param in model.params():
        param.grad = np.ones(3, 'f')
    model.a.update = lambda: None
    optimizer.update()
    assert [param.array[0] for param in model.params()] == [1, .75, .5]
    calls = []
    whole = chainer.optimizer.UpdateRule.update
    monkeypatch.setattr(chainer.optimizer.UpdateRule, 'update',
                        lambda rule, param: (calls.append(param), whole(rule, param)))
    optimizer.update()
    assert calls == [model.b, model.c]


UPDATE = """
import sys
import chainer, numpy as np
from chainer import optimizers
def update(n, hook=False):
    model = chainer.Link()
    with model.init_scope():
        model.p = chainer.Parameter(np.zeros(n, 'f'))
    optimizer = optimizers.SGD(1.).setup(model)
    if hook:
        model.p.update_rule.add_hook(lambda rule, param: None, 'hook')
    for _ in range(2):
        model.p.grad = np.ones(n, 'f')
        optimizer.update()
    assert (model.p.array == -2).all()
    return 'torch' in sys.modules
"""


def test_small_updates_do_not_import_pytorch(python):
    pytest.importorskip('torch')
    python(UPDATE + """
many = 1 << 22
assert chainer.config.fused_updates == 'auto'
assert not update(9) and not update(9, hook=True)
with chainer.using_config('fused_updates', False):
    assert not update(many) and not update(many, hook=True)
with chainer.using_config('use_torch', 'never'):
    assert not update(many)
chainer.functions.relu(np.ones(3, 'f'))
assert 'torch' in sys.modules
import torch
calls, fused = [], torch._fused_sgd_
torch._fused_sgd_ = lambda *args, **kwargs: calls.append(1) or fused(*args, **kwargs)
update(9)
assert len(calls) == 2
""")


def test_which_updates_import_pytorch(python):
    pytest.importorskip('torch')
    python(f'{UPDATE}\nassert update(1 << 22)')
    python(f'{UPDATE}\nassert update(9)', CHAINER_FUSED_UPDATES='1')
