"""Updates in one pass have the bits of one rule after another; PyTorch's differ in rounding."""

import copy
import itertools
import pickle

import chainer
import numpy as np
import pytest
from chainer import optimizer_hooks, optimizers
from each_case import each_case
from update_cases import (
    BLOCK,
    OPTIMIZERS,
    SHAPES,
    UNUSUAL,
    assert_same_bits,
    one_by_one,
    step,
    train,
)

from chainer_compat import block_updates

pytestmark = pytest.mark.mpi_skip

FUSED = {'SGD', 'MomentumSGD', 'AdaGrad', 'Adam', 'AdamW', 'AMSGrad', 'no beta'}


@pytest.fixture(autouse=True)
def options(monkeypatch):
    monkeypatch.setattr(block_updates, 'BLOCK', BLOCK)
    # By default, small updates do not import PyTorch.
    monkeypatch.setattr(chainer.global_config, 'fused_updates', True)


def change_hyperparameters(model, optimizer):
    name = 'alpha' if hasattr(optimizer.hyperparam, 'alpha') else 'lr'
    setattr(model.p3.update_rule.hyperparam, name, .3)
    setattr(model.p7.update_rule.hyperparam, name, np.array([.3], 'f'))
    setattr(optimizer.hyperparam, name, np.float32(.05))


def disable(model, optimizer):
    model.p0.update_rule.enabled = False


def add_hooks(model, optimizer):
    optimizer.add_hook(optimizer_hooks.WeightDecay(.01))
    optimizer.add_hook(optimizer_hooks.GradientClipping(5))
    model.p4.update_rule.add_hook(optimizer_hooks.Lasso(.01))


def scale_loss(model, optimizer):
    optimizer.set_loss_scale(8.)


def use_other_rules(model, optimizer):
    model.p0.update_rule = optimizers.SGD(.5).create_update_rule()
    model.p3.update_rule = None

    class Mine(type(model.p7.update_rule)):
        def update_core_cpu(self, param):
            param.array -= param.grad

    model.p7.update_rule = Mine()
    model.p2.update_rule.update_core = lambda param: param.array.fill(3)


def tie(model, optimizer):
    """A view of a large parameter, the same array twice, and a parameter with two paths."""
    model.p7.array = model.p4.array[:16].reshape(4, 4)
    model.p2.array = model.p1.array.reshape(1)
    with model.init_scope():
        model.q0 = model.p0


def tie_with_a_later_one(model, optimizer):
    """In the middle, while no other parameter separates the two updates."""
    with model.init_scope():
        model.p5b = model.p0


def tie_views_of_a_buffer(model, optimizer):
    buffer = bytearray(400)
    for i, name in enumerate(['p0', 'p7']):
        param = getattr(model, name)
        data = np.frombuffer(buffer, param.dtype, param.size, 8 * i).reshape(param.shape)
        data[...] = param.array
        param.array = data


def use_strides(model, optimizer):
    model.p0.array = np.asfortranarray(model.p0.array)
    model.p7.array = np.repeat(model.p7.array, 2, 1)[:, ::2]


def copy_everything(model, optimizer):
    """Train for a step, then go on with a copy."""
    step(model, optimizer, np.random.RandomState(9))
    return pickle.loads(pickle.dumps(copy.deepcopy(optimizer)))


def share_rules(model, optimizer):
    model.p8.update_rule = model.p0.update_rule


def share_states(model, optimizer):
    step(model, optimizer, np.random.RandomState(9))
    model.p8.update_rule = copy.copy(model.p0.update_rule)


def reorder_states(model, optimizer):
    step(model, optimizer, np.random.RandomState(9))
    for state in filter(None, (param.update_rule.state for param in [model.p8, model.p1])):
        first = next(iter(state))
        state[first] = state.pop(first)


def derive_rules(model, optimizer):
    """Rules of one class, with another attribute each."""
    rule = type(model.p0.update_rule)

    class Derived(rule):
        factor = 1.

        @property
        def alpha_t(self):
            return rule.alpha_t.fget(self) * self.factor

    for factor, param in enumerate([model.p0, model.p8], 1):
        param.update_rule = Derived(optimizer.hyperparam)
        param.update_rule.factor = factor


CHANGES = [
    None, share_rules, share_states, reorder_states, derive_rules, change_hyperparameters, disable,
    add_hooks, scale_loss, use_other_rules, tie, tie_with_a_later_one, tie_views_of_a_buffer,
    use_strides, copy_everything]


def each_change(*dtypes):
    """Each change in the first dtype, and training without changes in all of them."""
    return each_case('change, dtype', [
        *[(change, dtypes[0]) for change in CHANGES], *[(None, dtype) for dtype in dtypes[1:]]])


@pytest.mark.parametrize('name', OPTIMIZERS)
@each_change('f', 'e', 'd')
def test_same_bits_as_one_by_one(name, monkeypatch, change, dtype):
    """Also in float16, for which PyTorch has no kernel."""
    with one_by_one(monkeypatch):
        expected = train(name, change, dtype)
    with chainer.using_config('use_torch', 'auto' if dtype == 'e' else 'never'):
        found = train(name, change, dtype)
    assert_same_bits(found, expected)


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_same_bits_of_special_values(name, monkeypatch):
    """With NumPy; as gradients."""
    with one_by_one(monkeypatch):
        expected = train(name, special=True)
    with chainer.using_config('use_torch', 'never'):
        assert_same_bits(train(name, special=True), expected)


LATER = {'lr': .01, 'momentum': 0., 'alpha': .5, 'eta': 1.5, 'eps': 1e-3, 'beta2': .9,
         'weight_decay_rate': .3, 'amsgrad': False}


@each_case('name, key', [('MomentumSGD', 'lr'), ('MomentumSGD', 'momentum'), *itertools.product(
    ['Adam', 'AMSGrad'], ['alpha', 'eta', 'eps', 'beta2', 'weight_decay_rate', 'amsgrad'])])
def test_numbers_that_change_while_training(monkeypatch, name, key):
    def later(model, optimizer):
        setattr(optimizer.hyperparam, key, LATER[key])

    with one_by_one(monkeypatch):
        expected = train(name, later=later)
    with chainer.using_config('use_torch', 'never'):
        assert_same_bits(train(name, later=later), expected)


@pytest.mark.parametrize('name', sorted(OPTIMIZERS.keys() - UNUSUAL))
@each_change('d')
def test_pytorch_differs_in_rounding(name, monkeypatch, operators, change, dtype):
    with one_by_one(monkeypatch):
        expected = train(name, change, dtype)
    found = train(name, change, dtype)
    if change is None:
        with operators() as names:
            train(name, None)
        assert any(each.startswith('_fused') for each in names) == (name in FUSED)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


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
    """PyTorch ignores ``np.errstate``.  Parameters before the one of the error are updated."""
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
            for call in lambda: chainer.functions.linear(large, large), optimizer.update:
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


@pytest.mark.parametrize('rate', [1e-4, 1e-12, 1e-17])
@pytest.mark.parametrize('dtype', ['f', 'd'])
def test_a_small_learning_rate(dtype, rate):
    model = chainer.Link()
    with model.init_scope():
        model.p = chainer.Parameter(np.zeros(3, dtype))
    optimizer = optimizers.MomentumSGD(rate).setup(model)
    model.p.grad = np.ones(3, dtype)
    optimizer.update()
    np.testing.assert_allclose(model.p.array, -rate, rtol=1e-6 if dtype == 'f' else 1e-15)


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


def test_errors_are_those_of_chainer():
    model = chainer.Chain()
    with model.init_scope():
        model.a, model.b = (chainer.Parameter(np.ones(3, 'f')) for _ in range(2))
    for param in model.params():
        param.grad = np.ones(3, 'f')
    optimizer = optimizers.SGD(.25).setup(model)
    optimizer.update()
    model.b.array.flags.writeable = False
    with pytest.raises(ValueError, match='read-only'):
        optimizer.update()
    model.b.array.flags.writeable = True
    with pytest.raises(ZeroDivisionError):
        optimizers.Adam(beta1=1.).setup(model).update()
    optimizers.SGD(np.array([.1, .2, .3], 'f')).setup(model).update()
    np.testing.assert_allclose(model.b.array, .75 - np.array([.1, .2, .3]), rtol=1e-6)


def test_states_after_an_error_are_those_of_the_parameter():
    model = chainer.Link()
    shape = 2, BLOCK
    with model.init_scope():
        model.p = chainer.Parameter(np.ones(shape, 'e'))
    model.p.grad = np.ones(shape, 'e')
    with pytest.raises(ValueError, match='eps of RMSprop optimizer is too small'):
        optimizers.RMSprop(eps=1e-8).setup(model).update()
    assert {state.shape for state in model.p.update_rule.state.values()} == {shape}
    np.testing.assert_array_equal(model.p.array, 1)


def test_a_parameter_without_array():
    model = chainer.Link()
    with model.init_scope():
        model.p, model.q = chainer.Parameter(), chainer.Parameter(np.ones(3, 'f'))
    model.cleargrads()
    model.q.grad = np.ones(3, 'f')
    optimizers.Adam(.5).setup(model).update()  # warnings are errors
    assert model.p.array is None
    np.testing.assert_allclose(model.q.array, .5, 1e-4)


def test_the_array_of_another_parameter_as_gradient(monkeypatch):
    """The other one is updated before."""
    monkeypatch.setattr(chainer.config, 'use_torch', 'never')
    model = chainer.Link()
    with model.init_scope():
        model.x, model.y = chainer.Parameter(np.ones(3, 'f')), chainer.Parameter(np.ones(3, 'f'))
    optimizer = optimizers.SGD(.5).setup(model)
    model.x.grad, model.y.grad = np.ones(3, 'f'), model.x.array
    optimizer.update()
    assert model.x.array.tolist() == [.5] * 3
    assert model.y.array.tolist() == [.75] * 3


@pytest.mark.parametrize('name', ['update', 'update_core', 'update_core_cpu'])
def test_replaced_methods_of_a_rule(monkeypatch, name):
    model = chainer.Link()
    with model.init_scope():
        model.x, model.y = chainer.Parameter(np.ones(3, 'f')), chainer.Parameter(np.ones(3, 'f'))
    optimizer = optimizers.SGD().setup(model)
    model.x.grad = model.y.grad = np.ones(3, 'f')
    monkeypatch.setattr(optimizers.sgd.SGDRule, name, lambda rule, param: param.array.fill(3),
                        raising=False)
    optimizer.update()
    assert all((param.array == 3).all() for param in model.params())


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


@pytest.mark.parametrize(('option', 'call'), [
    ('', 'update(1 << 22)'), ('', 'update(1 << 22, hook=True)'), ('1', 'update(9)')])
def test_which_updates_import_pytorch(python, option, call):
    pytest.importorskip('torch')
    python(f'{UPDATE}\nassert {call}', CHAINER_FUSED_UPDATES=option)
