"""The plan of an update is used again, and any change between two updates is noticed."""

import copy
import gc
import weakref

import chainer
import numpy as np
import pytest
from chainer import optimizers

from chainer_compat.updates import one_pass

pytestmark = pytest.mark.mpi_skip


@pytest.mark.parametrize('name', ['MomentumSGD', 'SGD', 'Adam', 'AMSGrad', 'RMSprop'])
def test_plans_are_used(name, kernels, monkeypatch):
    calls = []
    original = one_pass._update
    monkeypatch.setattr(one_pass, '_update', lambda *args: calls.append(1) or original(*args))
    model = chainer.Sequential(*(chainer.links.Linear(3, 3) for _ in range(4)))
    optimizer = getattr(optimizers, name)().setup(model)
    for step in range(5):
        for param in model.params():
            param.grad = np.ones(param.shape, 'f')
        optimizer.update()
        assert len(calls) == 1 + (step > 0 and name == 'never')
    assert {param.update_rule.t for param in model.params()} == {5}


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
    assert rule in one_pass._plans
    n_plans = len(one_pass._plans)
    freed = [weakref.ref(each) for each in (model, rule, model.l.W.array, *rule.state.values())]
    del model, optimizer, rule
    gc.collect()
    assert not any(each() is not None for each in freed)
    assert len(one_pass._plans) < n_plans


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
