"""Gradients without functions of their own are those of Chainer's functions, bit by bit."""

import chainer
import chainer.functions as F
import numpy as np
import pytest

pytest.importorskip('torch')
pytestmark = pytest.mark.mpi_skip

RANDOM = np.random.RandomState(0)


def array(*shape, dtype='f'):
    return RANDOM.standard_normal(shape).astype(dtype)


CASES = {
    'convolution': (lambda x, W, b: F.convolution_2d(x, W, b, pad=1),
                    array(2, 4, 6, 6), array(8, 4, 3, 3), array(8)),
    'no bias': (lambda x, W: F.convolution_2d(x, W, stride=2, pad=1),
                array(2, 4, 7, 7), array(8, 4, 3, 3)),
    'groups': (lambda x, W: F.convolution_2d(x, W, dilate=2, groups=2),
               array(2, 4, 9, 9), array(8, 2, 3, 3)),
    'pointwise': (F.convolution_2d, array(2, 4, 5, 5, dtype='d'), array(8, 4, 1, 1, dtype='d')),
    'cover_all': (lambda x, W: F.convolution_2d(x, W, stride=2, cover_all=True),
                  array(2, 4, 6, 6), array(8, 4, 3, 3)),
    'not contiguous': (lambda x, W: F.convolution_2d(x.transpose(0, 1, 3, 2), W[:, ::-1]),
                       array(2, 4, 5, 6), array(8, 4, 3, 3)),
    'deconvolution': (lambda x, W, b: F.deconvolution_2d(x, W, b, stride=2, pad=1),
                      array(2, 4, 5, 6), array(4, 3, 4, 4), array(3)),
    'deconvolution without bias': (lambda x, W: F.deconvolution_2d(x, W, pad=1),
                                   array(2, 4, 5, 6, dtype='d'), array(4, 3, 3, 3, dtype='d')),
    'outsize': (lambda x, W: F.deconvolution_2d(x, W, stride=2, outsize=(10, 11)),
                array(2, 4, 5, 5), array(4, 3, 3, 3)),
    'deconvolution of groups': (lambda x, W: F.deconvolution_2d(x, W, dilate=2, groups=2),
                                array(2, 4, 5, 5), array(4, 3, 3, 3)),
    'transposed': (lambda x, W: F.deconvolution_2d(x.transpose(0, 1, 3, 2), W[:, ::-1]),
                   array(2, 4, 5, 6), array(4, 3, 3, 3)),
    'linear': (F.linear, array(5, 3), array(4, 3), array(4)),
    'linear without bias': (F.linear, array(5, 3), array(4, 3)),
    'relu': (F.relu, array(3, 4)),
    'leaky relu': (F.leaky_relu, array(3, 4)),
    'negative slope': (lambda x: F.leaky_relu(x, -.3), array(3, 4)),
    'batch normalization': (F.batch_normalization, array(6, 3, 4, 4), array(3), array(3)),
    'of samples': (F.batch_normalization, array(6, 3, 4), array(3, 4), array(3, 4)),
}


def gradients(f, arrays, needed, hook=None):
    inputs = [chainer.Variable(x.copy(), requires_grad=i in needed) for i, x in enumerate(arrays)]
    names = []
    y = f(*inputs)
    y.grad = np.cos(np.arange(y.size, dtype=y.dtype)).reshape(y.shape)
    if hook is None:
        y.backward()
    else:
        with hook(names):
            y.backward()
    return [x.grad for x in inputs], names


class Watch(chainer.FunctionHook):
    name = 'watch'

    def __init__(self, names):
        self.names = names

    def forward_preprocess(self, function, in_data):
        self.names.append(function.label)


@pytest.mark.parametrize('name', CASES)
def test_the_same_bits(name):
    f, *arrays = CASES[name]
    for needed in ({0, 1, 2}, {0}, {1}, {2}, {0, 2}, {1, 2}):
        if not needed & {*range(len(arrays))}:
            continue
        found, _ = gradients(f, arrays, needed)
        expected, names = gradients(f, arrays, needed, hook=Watch)
        assert names  # a hook sees the functions that compute the gradients
        for a, b in zip(found, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('f', [F.relu, F.leaky_relu, lambda x: F.leaky_relu(x, -.3)])
def test_numbers_that_are_not_finite(value, f):
    x = array(3, 4)
    x[1, 2] = value
    gy = [array(3, 4), np.full((3, 4), value, 'f')]
    for each in gy:
        a, b = (chainer.Variable(x) for _ in range(2))
        for v, hooks in ((a, []), (b, [Watch([])])):
            y = f(v)
            y.grad = each
            with hooks[0] if hooks else chainer.using_config('debug', False):
                y.backward()
        np.testing.assert_array_equal(a.grad, b.grad)


def test_a_variable_used_twice():
    x, W = chainer.Variable(array(2, 4, 5, 5)), chainer.Variable(array(4, 4, 3, 3))
    grads = []
    for hook in (None, Watch):
        x.cleargrad()
        W.cleargrad()
        y = F.sum(F.relu(F.convolution_2d(x, W, pad=1) + F.convolution_2d(x, W, pad=1) + x))
        if hook is None:
            y.backward()
        else:
            with hook([]):
                y.backward()
        grads.append((x.grad, W.grad))
    for a, b in zip(*grads, strict=True):
        np.testing.assert_array_equal(a, b)


def test_gradients_of_gradients():
    """With ``enable_double_backprop``, the gradients have a graph."""
    x, W = chainer.Variable(array(2, 4, 5, 5)), chainer.Variable(array(4, 4, 3, 3))
    y = F.sum(F.relu(F.convolution_2d(x, W)) ** 2)
    y.backward(enable_double_backprop=True)
    assert x.grad_var.creator is not None
    assert W.grad_var.creator is not None


def test_arrays_that_the_program_replaces_after_forward():
    data = array(4, 4, 3, 3)

    def loss(x):
        W = chainer.Variable(data.copy())
        y = F.convolution_2d(x, W)
        W.array = np.ones_like(W.array) * 2
        return F.sum(y)

    check_watched(array(2, 4, 5, 5), loss)


def test_the_same_array_as_input_and_weight():
    check_watched(array(4, 4), lambda x: F.sum(F.linear(x, x)))


def check_watched(data, loss):
    """Check that a hook, for which Chainer computes the gradient of a loss, does not change it."""
    x, y = chainer.Variable(data), chainer.Variable(data)
    loss(x).backward()
    with Watch([]):
        loss(y).backward()
    np.testing.assert_array_equal(x.grad, y.grad)


def test_running_statistics_and_attributes_of_batch_normalization():
    x, gamma, beta = array(6, 3, 4, 4), array(3), array(3)
    found = []
    for mode in ('auto', 'never'):
        mean, var = np.zeros(3, 'f'), np.ones(3, 'f')
        with chainer.using_config('use_torch', mode):
            y = F.batch_normalization(x, gamma, beta, running_mean=mean, running_var=var,
                                      axis=(0, 2, 3))
        node = y.creator
        assert node.running_mean is mean
        found.append((y.array, mean, var, node.mean, node.inv_std))
        assert (node.axis, node.key_axis) == ((0, 2, 3), (1,))
        assert node.expander == (None, slice(None), None, None)
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
