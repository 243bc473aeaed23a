"""When the gradient of a parameter is complete."""

import threading

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer import _backprop_utils

from chainermn.optimizers._gradient_watch import watch


def parameter(value=2.0):
    return chainer.Parameter(np.full(3, value, np.float32))


def watched(loss, params, backward=None):
    """The gradients that were ready, by name, in order; all of them turn out to be right."""
    names = {param.node: name for name, param in params.items()}
    found = {}
    with watch(loss, names, lambda node, grad: found.update({names[node]: grad})) as depends:
        (loss.backward if backward is None else backward)()
    for name, grad in found.items():
        assert params[name].grad is grad
    assert {names[node] for node in depends} >= found.keys()
    return list(found)


def test_in_the_order_of_backward():
    a, b, c = (parameter(k) for k in range(3))
    loss = F.sum(F.tanh(F.tanh(a * a) * b) * c)
    assert watched(loss, {'a': a, 'b': b, 'c': c}) == ['c', 'b', 'a']


def test_a_parameter_waits_for_its_last_use():
    a, b = parameter(), parameter()
    loss = F.sum(F.tanh(F.tanh(a) * b) * a)
    assert watched(loss, {'a': a, 'b': b}) == ['b', 'a']


def test_what_the_loss_does_not_depend_on():
    a, b = parameter(), parameter()
    loss = F.sum(a * a)
    names = {a.node: 'a', b.node: 'b'}
    with watch(loss, names, lambda node, grad: None) as depends:
        assert set(depends) == {a.node}


def test_the_loss_is_a_parameter():
    a = chainer.Parameter(np.array(2, np.float32))
    assert watched(a, {'a': a}) == []


def test_gradients_that_are_added_up_later_are_not_ready():
    a = parameter()
    with chainer.using_config('lazy_grad_sum', True):
        loss = F.sum(a * a + F.tanh(a))
        assert watched(loss, {'a': a}) == []


def test_nothing_is_left():
    step = _backprop_utils.backprop_step
    a = parameter()
    loss = F.sum(a * a)
    with pytest.raises(ZeroDivisionError), watch(loss, {a.node: 'a'}, lambda node, grad: 1 / 0):
        assert _backprop_utils.backprop_step is not step
        loss.backward()
    assert _backprop_utils.backprop_step is step


def test_threads_are_apart():
    """The backward of another thread is not looked at; each has its own watch."""
    a, b = parameter(), parameter()
    here, there = F.sum(a * a), F.sum(b * b)
    found = []

    def other():
        found.append(watched(there, {'b': b}))

    def both():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        here.backward()

    assert watched(here, {'a': a}, both) == ['a']
    assert found == [['b']]
    assert b.grad is not None


def test_backward_within_backward():
    """Another graph, of the same parameter, does not count."""
    a, b = parameter(), parameter()

    class Inner(chainer.FunctionNode):
        def forward(self, inputs):
            return inputs

        def backward(self, indexes, grads):
            with chainer.force_backprop_mode():
                F.sum(b * b).backward()
            b.cleargrad()
            return grads

    loss = F.sum(Inner().apply((a * b,))[0])
    assert set(watched(loss, {'a': a, 'b': b})) == {'a', 'b'}


def test_chainer_calls_what_is_replaced():
    """Chainer looks the step up in its module each time; another version might not."""
    calls = []
    a = parameter()
    loss = F.sum(a * a)
    original = _backprop_utils.backprop_step
    _backprop_utils.backprop_step = lambda *args: (calls.append(args), original(*args))[1]
    try:
        loss.backward()
    finally:
        _backprop_utils.backprop_step = original
    assert len(calls) == 2
