"""Updates in one pass have the bits of one rule after another; PyTorch's differ in rounding."""

import contextlib
import copy
import pickle

import chainer
import numpy as np
import pytest
from chainer import optimizer_hooks, optimizers

from chainer_compat import block_updates, updates
from chainer_compat.torch_kernels import dispatch

pytestmark = pytest.mark.mpi_skip

OPTIMIZERS = {
    'SGD': lambda: optimizers.SGD(.1),
    'MomentumSGD': lambda: optimizers.MomentumSGD(.1, .8),
    'no momentum': lambda: optimizers.MomentumSGD(.1, 0),
    'no rate': lambda: optimizers.AdamW(0, weight_decay_rate=.1),
    'no beta': lambda: optimizers.Adam(.1, beta1=0, beta2=0, eps=1e-3),
    'NesterovAG': lambda: optimizers.NesterovAG(.1),
    'CorrectedMomentumSGD': lambda: optimizers.CorrectedMomentumSGD(.1),
    'AdaGrad': lambda: optimizers.AdaGrad(.1),
    'AdaDelta': optimizers.AdaDelta,
    'RMSprop': lambda: optimizers.RMSprop(eps=1e-3),
    'RMSpropGraves': optimizers.RMSpropGraves,
    'Adam': lambda: optimizers.Adam(.01, eps=1e-3),  # where eps matters
    'AdamW': lambda: optimizers.AdamW(.01, weight_decay_rate=.1, eta=.5),
    'AMSGrad': lambda: optimizers.AMSGrad(.01),
    'AdaBound': optimizers.AdaBound,
    'AMSBound': optimizers.AMSBound,
    'MSVAG': optimizers.MSVAG,  # updates each parameter by itself
    'SMORMS3': optimizers.SMORMS3,
}
BLOCK = 1 << 12  # smaller than that of the package, for speed
SHAPES = [(3, 4), (), (1,), (7,), (BLOCK + 3,), (2, BLOCK // 2), (5, 1, 2), (4, 4),
          (3, 4)]
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
    model.p3.update_rule.add_hook(optimizer_hooks.Lasso(.01))


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
    add_hooks, scale_loss, use_other_rules, tie, tie_views_of_a_buffer, use_strides,
    copy_everything]


def step(model, optimizer, random, before=None):
    for param in model.params():
        scale = optimizer._loss_scale or 1
        param.grad = np.asarray(scale * random.normal(size=param.shape), param.dtype)
        param._loss_scale = optimizer._loss_scale
    if before:
        before(model)
    optimizer.update()


def train(name, change, dtype='f', each=None):
    """Return all parameters, states and numbers of updates; ``each`` is called before a step."""
    random = np.random.RandomState(0)
    model = chainer.Chain()
    with model.init_scope():
        for i, shape in enumerate(SHAPES):
            setattr(model, f'p{i}', chainer.Parameter(np.asarray(random.normal(size=shape), dtype)))
    optimizer = OPTIMIZERS[name]().setup(model)
    optimizer = (change and change(model, optimizer)) or optimizer
    model = optimizer.target
    for _ in range(4):
        step(model, optimizer, random, each)
    found = []
    for param in model.params():
        rule = param.update_rule
        found.append(param.array)
        if rule:
            found += [*(rule.state or {}).values(), rule.t]
    return found


@contextlib.contextmanager
def one_by_one(monkeypatch):
    """Update as Chainer does: the rule of each parameter, with whole arrays."""
    with monkeypatch.context() as patch:
        patch.setattr(updates, 'update', lambda params, _: [param.update() for param in params])
        patch.setattr(block_updates, 'BLOCK', 1 << 40)
        with chainer.using_config('fused_updates', False):
            yield


@pytest.mark.parametrize('change', CHANGES)
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_same_bits_as_one_by_one(name, change, monkeypatch):
    with one_by_one(monkeypatch):
        expected = train(name, change)
    with chainer.using_config('use_torch', 'never'):
        found = train(name, change)
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize('change', CHANGES)
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_pytorch_differs_in_rounding(name, change, monkeypatch, request):
    pytest.importorskip('torch')
    operators = request.getfixturevalue('operators')
    with one_by_one(monkeypatch):
        expected = train(name, change, 'd')
    found = train(name, change, 'd')
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
        for x, y in zip(train(name, change), expected, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(('option', 'value'), [('use_torch', 'never'), ('fused_updates', False)])
def test_switches(option, value, monkeypatch):
    with one_by_one(monkeypatch):
        expected = train('Adam', None)
    with chainer.using_config(option, value):
        found = train('Adam', None)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


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


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_float16(name):
    """PyTorch has no such kernel; the largest error of one step is that of the dtype."""
    model, expected = chainer.Link(), chainer.Link()
    for link, dtype in (model, 'e'), (expected, 'd'):
        with link.init_scope():
            link.p = chainer.Parameter(np.linspace(-1, 1, 5).astype(dtype))
        link.p.grad = np.linspace(1, 2, 5).astype(dtype)
        OPTIMIZERS[name]().setup(link).update()
    assert model.p.dtype == np.float16
    np.testing.assert_allclose(model.p.array, expected.p.array, 1e-2, 2e-3)


def test_a_parameter_without_array():
    model = chainer.Link()
    with model.init_scope():
        model.p, model.q = chainer.Parameter(), chainer.Parameter(np.ones(3, 'f'))
    model.cleargrads()
    model.q.grad = np.ones(3, 'f')
    optimizers.Adam(.5).setup(model).update()  # warnings are errors
    assert model.p.array is None
    np.testing.assert_allclose(model.q.array, .5, 1e-4)


def test_pickles_are_those_of_chainer():
    model = chainer.links.Linear(2, 2)
    optimizer = optimizers.Adam().setup(model)
    optimizer.update(lambda: chainer.functions.sum(model(np.ones((1, 2), 'f'))))
    assert b'chainer_compat' not in pickle.dumps([model, optimizer])


def test_a_closed_form():
    """MomentumSGD with a constant gradient, against the sum of the geometric series."""
    model = chainer.Chain()
    with model.init_scope():
        model.a, model.b = (chainer.Parameter(np.zeros(n, 'd')) for n in (3, 5))
    optimizer = optimizers.MomentumSGD(.1, .5).setup(model)
    for _ in range(3):
        for param in model.params():
            param.grad = np.arange(param.size, dtype='d')
        optimizer.update()
    for param in model.params():  # velocities: -lr g, -1.5 lr g, -1.75 lr g
        np.testing.assert_allclose(param.array, -.425 * np.arange(param.size), rtol=1e-12)
        assert param.update_rule.t == 3


@pytest.mark.parametrize('name', ['data', 'state', 'gradient', 'hook', 'disabled'])
def test_changes_between_steps(name, monkeypatch):
    """A program replaces arrays, or changes a rule, while it trains."""
    def each(model):
        param = model.p5
        rule = param.update_rule
        if name == 'data':
            param.array = param.array.copy() + 1
        elif name == 'state' and rule.state:
            rule.state['v'] = rule.state['v'] + 1
        elif name == 'gradient':
            param.grad = np.asfortranarray(param.grad)
        elif name == 'hook' and rule.t == 2:
            rule.add_hook(optimizer_hooks.WeightDecay(.1))
        elif name == 'disabled':
            rule.enabled = not rule.enabled

    with one_by_one(monkeypatch):
        expected = train('MomentumSGD', None, each=each)
    with chainer.using_config('use_torch', 'never'):
        found = train('MomentumSGD', None, each=each)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)
    if not dispatch.why_unavailable():
        for x, y in zip(train('MomentumSGD', None, each=each), expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


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
