"""The plan of an update is used again, and any change between two updates is noticed."""

import copy
import gc
import threading
import weakref

import chainer
import numpy as np
import pytest
from chainer import optimizer_hooks, optimizers
from chainer.optimizers.momentum_sgd import MomentumSGDRule
from each_case import each_case
from update_cases import update_each

from chainer_compat import block_updates, updates

pytestmark = pytest.mark.mpi_skip

SHAPES = [(3, 4), (7,), (), (2, 5), (4, 3)]


class Hook:
    name = 'hook'
    timing = 'pre'

    def __call__(self, rule, param):
        param.grad *= 2


class Mine(MomentumSGDRule):
    def update_core_cpu(self, param):
        param.array -= param.grad


class MyParameter(chainer.Parameter):
    def update(self):
        self.array -= 1


def replace_parameter(model, optimizer):
    with model.init_scope():
        model.p1 = chainer.Parameter(np.full((7,), 3, 'f'))
    model.p1.grad = np.ones(7, 'f')
    model.p1.update_rule = optimizer.create_update_rule()


def add_parameter(model, optimizer):
    with model.init_scope():
        model.q = chainer.Parameter(np.full((2,), 3, 'f'))
    model.q.grad = np.ones(2, 'f')
    model.q.update_rule = optimizer.create_update_rule()


def add_link(model, optimizer):
    with model.init_scope():
        model.link = chainer.Link()
    with model.link.init_scope():
        model.link.q = chainer.Parameter(np.full((2,), 3, 'f'))
    model.link.q.grad = np.ones(2, 'f')
    model.link.q.update_rule = optimizer.create_update_rule()


def use_my_parameter(model, optimizer):
    rule, grad = model.p1.update_rule, model.p1.grad
    with model.init_scope():
        model.p1 = MyParameter(model.p1.array)
    model.p1.update_rule, model.p1.grad = rule, grad


def load_states(model, optimizer):
    saved = {}
    chainer.serializers.DictionarySerializer(saved).save(optimizer)
    saved = {key: value + 1 if key.endswith('v') else value for key, value in saved.items()}
    chainer.serializers.NpzDeserializer(saved).load(optimizer)


def change_class(model, optimizer):
    model.p1.__class__ = MyParameter


def exchange_arrays(model, optimizer):
    model.p0.array, model.p4.array = (model.p4.array.reshape(3, 4), model.p0.array.reshape(4, 3))


def of(name):
    """Return a decorator-free change of ``p1``: an assignment to a path of attributes."""
    def change(value):
        def assign(model, optimizer):
            target = model.p1
            *path, last = name.split('.')
            for each in path:
                target = getattr(target, each)
            setattr(target, last, value(target))
        return assign
    return change


CHANGES = {
    'nothing': lambda model, optimizer: None,
    'array': of('array')(lambda param: param.array + 1),
    'view': of('array')(lambda param: np.repeat(param.array, 2)[::2]),
    'array of another': of('array')(lambda param: param.array.astype('d')),
    'gradient of another dtype': of('_grad')(lambda param: param.grad.astype('d')),
    'gradient of another shape': of('_grad')(lambda param: np.full(1, 2, 'f')),
    'strided gradient': of('grad')(lambda param: np.repeat(param.grad, 2)[::2]),
    'read-only gradient': lambda model, optimizer: model.p1.grad.setflags(write=False),
    'no gradient': of('grad')(lambda param: None),
    'gradient is an array': lambda model, optimizer: setattr(
        model.p4, '_grad', model.p0.array.reshape(4, 3)),
    'gradient is a state': lambda model, optimizer: setattr(
        model.p4, '_grad', model.p0.update_rule.state['v'].reshape(4, 3)),
    'shape in place': lambda model, optimizer: [
        setattr(each, 'shape', (7, 1)) for each in (
            model.p1.array, model.p1.grad, model.p1.update_rule.state['v'])],
    'equal gradients': lambda model, optimizer: setattr(
        model.p4, '_grad', model.p0._grad.reshape(4, 3)),
    'exchanged arrays': exchange_arrays,
    'tied arrays': lambda model, optimizer: setattr(
        model.p4, 'array', model.p0.array.reshape(4, 3)),
    'disabled': of('update_rule.enabled')(lambda rule: False),
    'rate of a rule': of('update_rule.hyperparam.lr')(lambda hyperparam: .5),
    'momentum of a rule': of('update_rule.hyperparam.momentum')(lambda hyperparam: 0.),
    'rate of the optimizer': lambda model, optimizer: setattr(optimizer, 'lr', .5),
    'array as rate': lambda model, optimizer: setattr(
        optimizer.hyperparam, 'lr', np.array(.5, 'f')),
    'other hyperparameters': of('update_rule.hyperparam')(
        lambda rule: optimizers.MomentumSGD(.7).create_update_rule().hyperparam),
    'other parent': of('update_rule.hyperparam._parent')(
        lambda hyperparam: optimizers.MomentumSGD(.7).hyperparam),
    'hook': lambda model, optimizer: model.p1.update_rule.add_hook(Hook()),
    'hook after': lambda model, optimizer: model.p1.update_rule.add_hook(
        lambda rule, param: param.array.fill(2), 'after', timing='post'),
    'other hooks': of('update_rule._hookable._pre_update_hooks')(lambda hooks: {'hook': Hook()}),
    'hook of the optimizer': lambda model, optimizer: optimizer.add_hook(
        optimizer_hooks.WeightDecay(.1)),
    'step': of('update_rule.t')(lambda rule: 7),
    'state': lambda model, optimizer: model.p1.update_rule.state.update(
        v=model.p1.update_rule.state['v'] + 1),
    'new state': of('update_rule._state')(lambda rule: {'v': rule.state['v'] + 1}),
    'no state': of('update_rule._state')(lambda rule: None),
    'other rule': of('update_rule')(lambda param: optimizers.SGD(.5).create_update_rule()),
    'my rule': of('update_rule')(lambda param: Mine(optimizers.MomentumSGD(.3).hyperparam)),
    'no rule': of('update_rule')(lambda param: None),
    'class of a rule': lambda model, optimizer: setattr(model.p1.update_rule, '__class__', Mine),
    'attribute of a rule': lambda model, optimizer: setattr(model.p1.update_rule, 'mine', 1),
    'attribute of a parameter': of('mine')(lambda param: 1),
    'renamed state': lambda model, optimizer: model.p1.update_rule.state.update(
        w=model.p1.update_rule.state['v']),
    'shared rule': lambda model, optimizer: setattr(
        model.p4, 'update_rule', copy.copy(model.p4.update_rule)),
    'method of a parameter': of('update')(lambda param: lambda: param.array.fill(3)),
    'method of a rule': of('update_rule.update_core')(
        lambda rule: lambda param: param.array.fill(3)),
    'loss scale': of('_loss_scale')(lambda param: 4.),
    'other attributes': of('__dict__')(lambda param: {**vars(param), '_loss_scale': 4.}),
    'deleted attribute': lambda model, optimizer: delattr(model.p1, '_layout'),
    'class of a parameter': change_class,
    'my parameter': use_my_parameter,
    'replaced parameter': replace_parameter,
    'added parameter': add_parameter,
    'added link': add_link,
    'removed parameter': lambda model, optimizer: delattr(model, 'p1'),
    'snapshot': load_states,
}


def train(change, undo=None, n=6):
    random = np.random.RandomState(0)
    model = chainer.Chain()
    with model.init_scope():
        for i, shape in enumerate(SHAPES):
            setattr(model, f'p{i}', chainer.Parameter(random.normal(size=shape).astype('f')))
    optimizer = optimizers.MomentumSGD(.1, .8).setup(model)
    for i in range(n):
        for param in model.params():
            if type(param) is chainer.Parameter and param.array.dtype == np.float32:
                param.grad = np.asarray(random.normal(size=param.shape), 'f')
        if i == 3:
            change(model, optimizer)
        optimizer.update()
    found = {}
    for name, param in sorted(model.namedparams()):
        found[name] = param.array
        if param.update_rule is not None:
            found[f'{name}/t'] = param.update_rule.t
            found.update({f'{name}/{key}': value
                          for key, value in (param.update_rule.state or {}).items()})
    return found


@each_case('name', CHANGES)
def test_changes_between_updates(kernels, monkeypatch, name):
    """Without plans, results have the same bits; one by one, they are equal but for rounding."""
    found = train(CHANGES[name])
    with monkeypatch.context() as patch:
        patch.setattr(updates, 'update_as_before', lambda *args: None)
        expected = train(CHANGES[name])
    with monkeypatch.context() as patch:
        patch.setattr(updates, 'update', update_each)
        alone = train(CHANGES[name])
    assert found.keys() == expected.keys() == alone.keys()
    for key in found:
        np.testing.assert_array_equal(found[key], expected[key], err_msg=key)
        np.testing.assert_allclose(found[key], alone[key], rtol=1e-4, atol=1e-5, err_msg=key)


@pytest.mark.parametrize('name', ['MomentumSGD', 'SGD', 'Adam', 'AMSGrad', 'RMSprop'])
def test_plans_are_used(name, kernels, monkeypatch):
    calls = []
    original = updates._update
    monkeypatch.setattr(updates, '_update', lambda *args: calls.append(1) or original(*args))
    model = chainer.Sequential(*(chainer.links.Linear(3, 3) for _ in range(4)))
    optimizer = getattr(optimizers, name)().setup(model)
    for step in range(5):
        for param in model.params():
            param.grad = np.ones(param.shape, 'f')
        optimizer.update()
        assert len(calls) == 1 + (step > 0 and name == 'never')
    assert {param.update_rule.t for param in model.params()} == {5}


@pytest.mark.parametrize('name, of_state', [
    ('NesterovAG', None), ('MomentumSGD', 'v'), ('RMSprop', 'ms'), ('AdaDelta', 'msg')])
def test_a_gradient_in_memory_that_its_update_changes(name, of_state, monkeypatch):
    """The rule reads the gradient again after it has changed it."""
    def train():
        model = chainer.Sequential(*(chainer.links.Linear(3, 3) for _ in range(3)))
        optimizer = getattr(optimizers, name)().setup(model)
        for step in range(5):
            for i, (_, param) in enumerate(sorted(model.namedparams())):
                if step == 0:
                    param.array[...] = np.arange(param.size).reshape(param.shape) + i
                state = param.update_rule.state
                shared = step > 2 and i % 2
                param.grad = ((state[of_state] if of_state else param.array) if shared
                              else np.full(param.shape, step + i, 'f'))
            optimizer.update()
        return [param.array for _, param in sorted(model.namedparams())]

    monkeypatch.setattr(chainer.global_config, 'use_torch', 'never')
    found = train()
    monkeypatch.setattr(updates, 'update', update_each)
    for x, y in zip(found, train(), strict=True):
        np.testing.assert_array_equal(x, y)


class Model(chainer.Chain):
    """The initializer of its parameter refers to it."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.l = chainer.links.Linear(None, 3, initialW=self.initialize, nobias=True)

    def initialize(self, array):
        array[...] = 1

    def forward(self, x):
        return chainer.functions.sum(self.l(x))


@pytest.mark.parametrize('name', ['SGD', 'Adam'])
@pytest.mark.parametrize('copy_of', [copy.deepcopy, lambda x: x])
def test_models_and_optimizers_are_freed(name, copy_of, kernels):
    model, optimizer = copy_of((model := Model(), getattr(optimizers, name)().setup(model)))
    for _ in range(3):
        optimizer.update(model, np.ones((2, 4), 'f'))
    rule = model.l.W.update_rule
    assert rule in updates._plans
    n_plans = len(updates._plans)
    freed = [weakref.ref(each) for each in (model, rule, model.l.W.array, *rule.state.values())]
    del model, optimizer, rule
    gc.collect()
    assert not any(each() is not None for each in freed)
    assert len(updates._plans) < n_plans


def test_states_are_freed_without_their_rules(kernels):
    """The model may be used for a long time after training."""
    model = chainer.links.Linear(3, 3)
    optimizer = optimizers.Adam().setup(model)
    for _ in range(3):
        optimizer.update(lambda x: chainer.functions.sum(model(x)), np.ones((2, 3), 'f'))
    freed = [weakref.ref(array) for param in model.params()
             for array in (param.array, *param.update_rule.state.values())]
    del optimizer
    for param in model.params():
        param.update_rule = None
        param.array = param.array.copy()
    del param
    gc.collect()
    assert not any(each() is not None for each in freed)


def test_a_model_without_a_hash():
    class Model(chainer.Chain):
        def __eq__(self, other):
            return self is other

        __hash__ = None

    model = Model(a=chainer.links.Linear(3, 3))
    optimizer = optimizers.SGD(1.).setup(model)
    for _ in range(2):
        model.a.b.grad = np.ones(3, 'f')
        model.a.W.grad = np.ones((3, 3), 'f')
        optimizer.update()
    assert model.a.b.array.tolist() == [-2] * 3


def test_two_optimizers_of_one_model():
    """The second one replaces the rules of the first."""
    model = chainer.links.Linear(3, 3)
    first = optimizers.SGD(1.).setup(model)
    for optimizer in (first, first, optimizers.SGD(2.).setup(model), first):
        model.b.array[...] = 0
        model.cleargrads()
        model.b.grad, model.W.grad = np.ones(3, 'f'), np.ones((3, 3), 'f')
        optimizer.update()
        rate = model.b.update_rule.hyperparam.lr
        assert model.b.array.tolist() == [-rate] * 3
    assert rate == 2


def test_two_threads():
    model = chainer.links.Linear(3, 3)
    optimizer = optimizers.SGD(1.).setup(model)
    model.b.grad, model.W.grad = np.ones(3, 'f'), np.ones((3, 3), 'f')

    def run():
        for _ in range(100):
            with lock:
                optimizer.update()

    lock = threading.Lock()
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert model.b.array.tolist() == [-200] * 3


@pytest.mark.parametrize('n', [0, 2])
def test_an_error_advances_the_first_rule_only(n, monkeypatch):
    model = chainer.links.Linear(3, 3)
    optimizer = optimizers.SGD(1.).setup(model)
    model.b.grad, model.W.grad = np.ones(3, 'f'), np.ones((3, 3), 'f')
    for _ in range(n):
        optimizer.update()

    def fail(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(block_updates, 'update_group', fail)
    with pytest.raises(ZeroDivisionError):
        optimizer.update()
    assert [param.update_rule.t for param in model.params()] == [n + 1, n]
    monkeypatch.undo()
    optimizer.update()
    assert [param.update_rule.t for param in model.params()] == [n + 2, n + 1]
