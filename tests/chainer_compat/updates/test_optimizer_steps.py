"""A step in one pass has the same effects as Chainer's step, and calls replaced methods.

The reference is the optimizer without ``optimizer_steps.begin``, which then runs Chainer's methods.
"""

import cProfile
import pickle
import pstats

import chainer
import numpy as np
import pytest
from chainer import optimizers
from chainer.optimizer import GradientMethod

from chainer_compat.updates import one_pass, optimizer_steps

pytestmark = pytest.mark.mpi_skip


METHODS = ['reallocate_cleared_grads', 'check_nan_in_grads', 'call_hooks', 'is_safe_to_update',
           'update_loss_scale']


@pytest.mark.parametrize('name', ['SGD', 'MomentumSGD', 'Adam', 'RMSprop'])
def test_an_ordinary_step_calls_no_other_method(name):
    optimizer = getattr(optimizers, name)().setup(chainer.links.Linear(3, 2))
    for n in range(3):
        for param in optimizer.target.params():
            param.grad = np.ones(param.shape, 'f')
        profile = cProfile.Profile()
        profile.runcall(optimizer.update)
        called = {function for _, _, function in pstats.Stats(profile).stats}
        # The first step finds out what the next ones need.
        assert ({'namedparams', 'call_hooks', 'params'} <= called) == (n == 0)
        assert (called & {'namedparams', 'call_hooks', 'params'} == set()) == (n > 0)
    assert {param.update_rule.t for param in optimizer.target.params()} == {3}
    assert optimizer.t == 3


@pytest.mark.parametrize('method', [*METHODS, '_check_set_up', 'call_hook'])
def test_replaced_methods_of_chainer(method, monkeypatch):
    optimizer = optimizers.SGD().setup(chainer.links.Linear(3, 2))
    found = []

    def step():
        for param in optimizer.target.params():
            param.grad = np.ones(param.shape, 'f')
        found.append(optimizer_steps._is_ordinary(optimizer))
        optimizer.update()

    original = getattr(GradientMethod, method)
    step()
    monkeypatch.setattr(GradientMethod, method, lambda self, *args: original(self, *args))
    step()
    monkeypatch.undo()
    step()
    assert found == [True, False, True]


def test_pickles_after_a_step_are_those_of_chainer(monkeypatch):
    def step():
        model = chainer.links.Linear(2, 2, initialW=np.ones((2, 2), 'f'))
        optimizer = optimizers.MomentumSGD().setup(model)
        for _ in range(3):
            for param in model.params():
                param.grad = np.ones(param.shape, 'f')
            optimizer.update()
        assert model.W.update_rule in one_pass._plans
        return pickle.dumps([model, optimizer])

    found = step()
    assert b'chainer_compat' not in found
    copied = pickle.loads(found)[1]
    for param in copied.target.params():
        param.grad = np.ones(param.shape, 'f')
    copied.update()
    assert copied.t == 4
    assert copied.target.W.update_rule.t == 4
