"""A rule is elementwise only if the class that declares it also defines the computation."""

import chainer
import pytest
from chainer import optimizers
from chainer.optimizers.adam import AdamRule

from chainermn.optimizers import is_elementwise

pytestmark = pytest.mark.mpi_skip


def compute(self, *args):
    pass


METHODS = ['update', 'update_core', 'update_core_cpu', 'update_core_gpu', 'update_core_chainerx',
           'init_state']


@pytest.mark.parametrize('name', [
    'AdaDelta', 'AdaGrad', 'Adam', 'CorrectedMomentumSGD', 'MomentumSGD', 'MSVAG', 'NesterovAG',
    'RMSprop', 'RMSpropGraves', 'SGD', 'SMORMS3'])
def test_rules_of_chainer(name):
    assert is_elementwise(getattr(optimizers, name)().create_update_rule())


@pytest.mark.parametrize('method', METHODS)
def test_a_subclass_that_computes_must_say_so(method):
    silent = type('Rule', (AdamRule,), {method: compute})
    assert not is_elementwise(silent())
    assert not is_elementwise(type('Further', (silent,), {})())
    assert not is_elementwise(type('Mixed', (type('Mixin', (), {method: compute}), AdamRule), {})())
    declared = type('Rule', (silent,), {'is_elementwise': True})
    assert is_elementwise(declared())
    assert not is_elementwise(type('Further', (declared,), {method: compute})())
    assert not is_elementwise(type('Rule', (AdamRule,), {
        method: compute, 'is_elementwise': False})())


@pytest.mark.parametrize('method', METHODS)
def test_methods_of_an_instance(method):
    rule = AdamRule()
    setattr(rule, method, compute)
    assert not is_elementwise(rule)
    rule.is_elementwise = True
    assert is_elementwise(rule)


def test_subclasses_that_do_not_compute():
    assert is_elementwise(type('Rule', (AdamRule,), {'serialize': compute, 'name': 'mine'})())
    assert not is_elementwise(chainer.UpdateRule())
