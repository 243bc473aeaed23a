"""pseudo_connect passes values and gradients, and leads backward to the delegate."""
import chainer
import chainer.functions as F
import numpy as np
import pytest

import chainermn.functions as mnf


class Recorder(chainer.FunctionNode):
    """An empty output that notes when backward comes by."""

    def __init__(self):
        super().__init__()
        self.was_here = False

    def forward(self, inputs):
        return np.empty(0, np.float32),

    def backward(self, indexes, gys):
        self.was_here = True
        return None,


@pytest.mark.parametrize('count', [1, 2])
def test_backward_goes_both_ways(count):
    recorder = Recorder()
    delegate, = recorder.apply((chainer.Variable(np.ones(1, np.float32)),))
    xs = [chainer.Variable(np.full(2, i + 1, np.float32)) for i in range(count)]
    ys = mnf.pseudo_connect(delegate, *xs)
    assert isinstance(ys, tuple) and len(ys) == count
    for x, y in zip(xs, ys, strict=True):
        np.testing.assert_array_equal(x.array, y.array)
    sum(F.sum(y * y) for y in ys).backward()
    assert recorder.was_here
    for x in xs:
        np.testing.assert_array_equal(x.grad, 2 * x.array)


def test_an_unused_output_has_no_gradient():
    delegate = chainer.Variable(np.empty(0, np.float32))
    a, b = (chainer.Variable(np.ones(2, np.float32)) for _ in range(2))
    y, _ = mnf.pseudo_connect(delegate, a, b)
    F.sum(y).backward()
    assert (a.grad == 1).all() and b.grad is None


def test_without_a_delegate_nothing_changes():
    x = chainer.Variable(np.ones(2, np.float32))
    assert mnf.pseudo_connect(None, x) == (x,)

