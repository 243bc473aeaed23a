"""A step in one pass leaves what Chainer's step leaves, and calls what the program has replaced.

The reference is the optimizer without ``optimizer_steps.begin``, which then runs Chainer's methods.
"""

import cProfile
import pickle
import pstats

import chainer
import numpy as np
import pytest
from chainer import optimizer_hooks, optimizers
from chainer.optimizer import GradientMethod

from chainer_compat import optimizer_steps, updates

pytestmark = pytest.mark.mpi_skip


def begin_of_chainer(optimizer):
    optimizer.reallocate_cleared_grads()
    optimizer.check_nan_in_grads()
    return False


class Model(chainer.Chain):
    def __init__(self):
        super().__init__()
        random = np.random.RandomState(0)
        with self.init_scope():
            self.a = chainer.Parameter(random.normal(size=(3, 4)).astype('f'))
            self.inner = chainer.Chain()
            self.late = chainer.links.Linear(None, 2, initialW=1.)
        with self.inner.init_scope():
            self.inner.b = chainer.Parameter(random.normal(size=5).astype('f'))
            self.inner.c = chainer.Parameter(random.normal(size=()).astype('f'))


def hook(optimizer):
    for param in optimizer.target.params():
        if param.grad is not None:
            param.grad *= 2


hook.name, hook.timing = 'hook', 'pre'


def after(optimizer):
    optimizer.target.a.array[...] = 1


def clear(rule, param):
    param.grad = None


def replace_method(name):
    def change(optimizer, calls):
        method = getattr(optimizer, name)
        setattr(optimizer, name, lambda *args: (calls.append(name), method(*args))[1])
    return change


METHODS = ['reallocate_cleared_grads', 'check_nan_in_grads', 'call_hooks', 'is_safe_to_update',
           'update_loss_scale']

#: What happens before the third of five steps.
CHANGES = {
    'nothing': lambda optimizer, calls: None,
    'hook': lambda optimizer, calls: optimizer.add_hook(hook),
    'hook after': lambda optimizer, calls: optimizer.add_hook(after, 'after', timing='post'),
    'weight decay': lambda optimizer, calls: optimizer.add_hook(optimizer_hooks.WeightDecay(.1)),
    'clipping': lambda optimizer, calls: optimizer.add_hook(optimizer_hooks.GradientClipping(.1)),
    'hook of a rule': lambda optimizer, calls: optimizer.target.a.update_rule.add_hook(
        clear, 'clear', timing='post'),
    'no gradient': lambda optimizer, calls: optimizer.target.a.cleargrad(),
    'no gradients': lambda optimizer, calls: optimizer.target.cleargrads(),
    'disabled': lambda optimizer, calls: optimizer.target.inner.disable_update(),
    'dynamic scale': lambda optimizer, calls: optimizer.loss_scaling(interval=2),
    'static scale': lambda optimizer, calls: optimizer.loss_scaling(scale=4.),
    'scaled parameter': lambda optimizer, calls: setattr(optimizer.target.a, '_loss_scale', 2.),
    'rate': lambda optimizer, calls: setattr(optimizer, 'lr', .5),
    'late parameter': lambda optimizer, calls: optimizer.target.late(np.ones((1, 3), 'f')),
    'removed': lambda optimizer, calls: delattr(optimizer.target, 'inner'),
    'set up again': lambda optimizer, calls: optimizer.setup(optimizer.target),
    'another model': lambda optimizer, calls: optimizer.setup(Model()),
    'array': lambda optimizer, calls: setattr(optimizer.target.a, 'array', np.ones((3, 4), 'f')),
    **{name: replace_method(name) for name in METHODS},
}


class Counts(optimizers.MomentumSGD):
    """Overrides a method of each step."""

    def __init__(self, *args):
        super().__init__(*args)
        self.n = 0

    def call_hooks(self, timing='pre'):
        self.n += 1
        super().call_hooks(timing)


class KeepsNone(optimizers.MomentumSGD):
    def reallocate_cleared_grads(self):
        """Does nothing, as Chainer's documentation suggests."""


OPTIMIZERS = {'MomentumSGD': optimizers.MomentumSGD, 'counts': Counts, 'keeps None': KeepsNone}


def train(name, changes):
    """Return everything that a program sees after five steps."""
    random = np.random.RandomState(1)
    calls = []
    optimizer = OPTIMIZERS[name](.1, .8).setup(Model())
    for n in range(5):
        for param in optimizer.target.params():
            param.grad = None if param.array is None else np.asarray(
                random.normal(size=param.shape), 'f')
        for change in changes if n == 2 else ():
            CHANGES[change](optimizer, calls)
        try:
            optimizer.update()
        except Exception as error:  # Chainer's, of a parameter without array
            calls.append(str(error))
    found = {'calls': calls, 't': optimizer.t, 'scale': optimizer._loss_scale,
             'attributes': {name: value for name, value in vars(optimizer).items()
                            if isinstance(value, int | float)}}
    for path, param in optimizer.target.namedparams():
        rule = param.update_rule
        found[path] = (*map(described, (param.array, param._grad)), rule.t, {
            key: described(value) for key, value in (rule.state or {}).items()})
    return found


def described(array):
    return None if array is None else (array.dtype, array.shape, array.tobytes())


ALONE = [(name,) for name in CHANGES]
PAIRS = [(first, second) for first in ('hook', 'no gradient', 'late parameter', 'disabled', 'rate')
         for second in CHANGES if second != first]


@pytest.mark.usefixtures('kernels')
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_changes_between_steps(name, monkeypatch):
    for changes in ALONE + (PAIRS if name == 'MomentumSGD' else []):
        found = train(name, changes)
        with monkeypatch.context() as patch:
            patch.setattr(optimizer_steps, 'begin', begin_of_chainer)
            assert found == train(name, changes), changes


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
        assert model.W.update_rule in updates._plans
        return pickle.dumps([model, optimizer])

    found = step()
    assert b'chainer_compat' not in found
    copied = pickle.loads(found)[1]
    for param in copied.target.params():
        param.grad = np.ones(param.shape, 'f')
    copied.update()
    assert copied.t == 4
    assert copied.target.W.update_rule.t == 4


def test_an_optimizer_that_is_not_set_up():
    with pytest.raises((AttributeError, RuntimeError)):
        optimizers.SGD().update()


def test_an_error_in_a_step(monkeypatch):
    """The optimizer has counted the step, as Chainer's has."""
    optimizer = optimizers.SGD().setup(chainer.links.Linear(3, 2))
    for n in range(4):
        for param in optimizer.target.params():
            param.grad = np.ones(param.shape, 'f')
        if n == 3:
            monkeypatch.setattr(updates.block_updates, 'update_group', None)
            with pytest.raises(TypeError):
                optimizer.update()
        else:
            optimizer.update()
    assert optimizer.t == 4
