"""Types of inputs are checked once for each signature, and errors stay."""

import gc
import weakref

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer.functions.connection.convolution_2d import Convolution2DFunction
from chainer.functions.math.basic_math import Add
from chainer.utils.type_check import InvalidType

from chainer_compat.graph import type_checks

pytestmark = pytest.mark.mpi_skip

APPLY, INIT = chainer.FunctionNode.apply, chainer.Variable.__init__

X, W = np.ones((2, 4, 5, 5), 'f'), np.ones((6, 4, 3, 3), 'f')


@pytest.fixture(autouse=True)
def without_volatile(monkeypatch):
    """A test of ``volatile`` in the same process replaces these for good."""
    monkeypatch.setattr(chainer.FunctionNode, 'apply', APPLY)
    monkeypatch.setattr(chainer.Variable, '__init__', INIT)


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The classes whose types are checked."""
    found = []
    base = chainer.FunctionNode._check_data_type_forward

    def check(self, arrays):
        found.append(type(self).__name__)
        base(self, arrays)

    monkeypatch.setattr(chainer.FunctionNode, '_check_data_type_forward', check)
    monkeypatch.setattr(type_checks, '_base', check)
    monkeypatch.setattr(type_checks, '_accepted', set())
    monkeypatch.setattr(type_checks, '_checks', {})
    return found


def test_once_for_equal_signatures(calls):
    for _ in range(3):
        F.convolution_2d(X, W)
        F.convolution_2d(X, W, stride=2)  # the check does not read it
    assert calls == ['Convolution2DFunction']
    F.convolution_2d(X[:1], W)
    F.convolution_2d(X.astype('d'), W.astype('d'))
    F.convolution_2d(X, W, np.ones(6, 'f'))
    F.convolution_2d(X, W[:, :2], groups=2)
    assert len(calls) == 5


def test_errors(calls):
    F.convolution_2d(X, W)
    for _ in range(2):
        with pytest.raises(InvalidType, match=r'x_type.shape\[1\]|in_types\[0\].shape\[1\]'):
            F.convolution_2d(X[:, :3], W)
        with pytest.raises(InvalidType):
            F.convolution_2d(X, W, groups=2)
        with pytest.raises(InvalidType):
            F.convolution_2d(X.astype('i'), W)
        with pytest.raises(InvalidType):
            Add().apply((X, X.astype('d')))
    Add().apply((X, X))
    with pytest.raises(InvalidType):
        Add().apply((X, X.astype('d')))
    with pytest.raises(InvalidType):
        F.concat([X, X[:, :, :4]], axis=1)
    F.concat([X, X[:, :, :4]], axis=2)
    with pytest.raises(InvalidType):
        F.concat([X, X[:, :, :4]], axis=1)


def test_a_check_of_the_program(monkeypatch):
    F.convolution_2d(X, W)

    def refuse(self, in_types):
        raise InvalidType('my', 'check')

    monkeypatch.setattr(Convolution2DFunction, 'check_type_forward', refuse)
    with pytest.raises(InvalidType, match='my'):
        F.convolution_2d(X, W)


def test_a_class_of_the_program(calls):
    class Mine(Convolution2DFunction):
        limit = 9

        def check_type_forward(self, in_types):
            chainer.utils.type_check.expect(in_types[0].shape[0] < self.limit)

    Mine().apply((X, W))
    Mine.limit = 1
    with pytest.raises(InvalidType):
        Mine().apply((X, W))


def test_a_class_of_the_program_is_freed(calls):
    """Its methods may refer to variables, hence to a whole graph."""
    def scale(factor):
        class Scale(chainer.FunctionNode):
            def check_type_forward(self, in_types):
                chainer.utils.type_check.expect(in_types[0].dtype == factor.dtype)

            def forward(self, inputs):
                return inputs[0] * factor.array,

        assert Scale().apply((X,))[0].array[0, 0, 0, 0] == 2
        return weakref.ref(Scale), weakref.ref(factor)

    found = [scale(chainer.Variable(np.full((), 2, 'f'))) for _ in range(3)]
    gc.collect()
    assert not any(each() is not None for pair in found for each in pair)
    assert calls == ['Scale'] * 3


def test_many_signatures(monkeypatch, calls):
    monkeypatch.setattr(type_checks, '_LIMIT', 3)
    for n in [1, 2, 3, 4, 5, 5, 1]:
        F.relu(np.ones(n, 'f'))
        assert len(type_checks._accepted) <= 3
    assert len(calls) == 6


def test_without_checks(calls):
    with chainer.using_config('type_check', False):
        F.relu(np.ones(3, 'f'))
    assert not calls
