"""Compares Chainer's functions with and without PyTorch's kernels."""

import chainer
import chainer.functions as F
import numpy as np
import pytest
from kernel_cases import Inputs

TOLERANCE = {'e': 1e-2, 'f': 2e-4, 'd': 1e-9}


@pytest.fixture
def agree(operators):
    """Return a function that compares results, gradients and second gradients.

    It also checks whether PyTorch computes, and that the inputs do not change.
    """

    def compare(f, *arrays, is_used=True, second=True):
        before = [array.copy() for array in arrays]
        with operators() as names, chainer.using_config('use_torch', 'never'):
            expected = derivatives(f, arrays, second)
        assert not names
        with operators() as names:
            found = derivatives(f, arrays, second)
        assert names or not is_used
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            tolerance = max(TOLERANCE[x.dtype.char] for x in (b, *arrays))
            scale = float(abs(b).max(initial=0))
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(scale, 1))
        for array, copy in zip(arrays, before, strict=True):
            np.testing.assert_array_equal(array, copy)

    return compare


@pytest.fixture
def agree_on(agree):
    """``agree_on(case, 'f')`` is the same for a case of ``kernel_cases``."""

    class Given:
        def __init__(self, xs, dtype):
            self.xs, self.dtype = iter(xs), dtype

        def __call__(self, *shape):
            return next(self.xs)

    def compare(case, dtype, **options):
        v = Inputs(dtype)
        case(v)
        agree(lambda *xs: case(Given(xs, dtype)), *(x.array for x in v.drawn), **options)

    return compare


def derivatives(f, arrays, second):
    """Return the results, their gradients and second gradients, as far as there are any."""
    np.random.seed(0)  # for dropout
    inputs = [chainer.Variable(array) for array in arrays]
    ys = f(*inputs)
    ys = ys if isinstance(ys, (tuple, list)) else (ys,)
    loss = sum(F.sum(F.sin(y) + y * y * y * .2) for y in ys)
    found = list(ys) + differentiate(loss, inputs, second)
    if second:
        squares = [F.sum(g * g) for g in found[len(ys):]]
        found += differentiate(sum(squares), inputs, False)
    return [y.array for y in found]


def differentiate(loss, inputs, twice):
    grads = chainer.grad([loss], inputs, enable_double_backprop=twice)
    return [g for g in grads if g is not None]
