"""Gradients that kernels compute directly match Chainer's gradient functions, bit by bit."""

import contextlib

import chainer
import chainer.functions as F
import numpy as np
import pytest
from each_case import each_case
from kernel_cases import CASES, ONCE, Inputs, draw

pytest.importorskip('torch')
pytestmark = pytest.mark.mpi_skip


def array(*shape):
    return draw(*shape, dtype='f')


OTHERS = [
    lambda v: F.convolution_2d(v(2, 4, 6, 6), v(8, 4, 3, 3), stride=2, cover_all=True),
    lambda v: F.convolution_2d(v(2, 4, 5, 6).transpose(0, 1, 3, 2), v(8, 4, 3, 3)[:, ::-1]),
    lambda v: F.deconvolution_2d(v(2, 4, 5, 5), v(4, 3, 3, 3), stride=2, outsize=(10, 11)),
    lambda v: F.deconvolution_2d(v(2, 4, 5, 6).transpose(0, 1, 3, 2), v(4, 3, 3, 3)[:, ::-1]),
]


def gradients(case, v, hook):
    y = case(v)
    y.grad = np.cos(np.arange(y.size, dtype=y.dtype)).reshape(y.shape)
    with hook:
        y.backward()
    return [x.grad for x in v.drawn]


class Watch(chainer.FunctionHook):
    name = 'watch'

    def __init__(self):
        self.names = []

    def forward_preprocess(self, function, in_data):
        self.names.append(function.label)


@each_case('case, dtype', [(case, dtype) for dtype in 'fd'
                           for case in [*CASES, *OTHERS] if case not in ONCE])
def test_the_same_gradients(case, dtype):
    """One call for all functions, or one by one because a hook watches them."""
    for needed in ({0, 1, 2}, {0}, {1}, {2}, {0, 2}, {1, 2}):
        v = Inputs(dtype)
        case(v)
        if not needed & {*range(len(v.drawn))}:
            continue
        hook = Watch()
        found = gradients(case, Inputs(dtype, needed), contextlib.nullcontext())
        expected = gradients(case, Inputs(dtype, needed), hook)
        assert hook.names  # it sees the functions that compute the gradients
        for a, b in zip(found, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == b.dtype
                tolerance = {'f': 2e-6, 'd': 2e-15}[dtype]
                np.testing.assert_allclose(a, b, tolerance, tolerance * abs(b).max(initial=0))


def test_the_same_array_as_input_and_weight():
    check_watched(array(4, 4), lambda x: F.sum(F.linear(x, x)))


def check_watched(data, loss):
    """Check that a hook, for which Chainer computes the gradient of a loss, does not change it."""
    x, y = chainer.Variable(data), chainer.Variable(data)
    loss(x).backward()
    with Watch():
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
