"""Compares Chainer functions with plain NumPy, forward and backward.

Of the functions here each output is linear in each input, or nearly: so the derivatives of the
NumPy references, by which the gradients are checked, come from differences with hardly an error.
"""

import importlib.util
import pkgutil

import chainer
import numpy as np
import pytest

from chainer_compat.pytorch import kernels

TOLERANCE = {'e': 1e-2, 'f': 1e-5, 'd': 1e-10}


def draw(*shape, dtype='d', seed=0):
    return np.random.RandomState(seed).standard_normal(shape).astype(dtype)


def compare(a, b, dtype='d'):
    a, b = (x.array if isinstance(x, chainer.Variable) else x for x in (a, b))
    assert a.shape == np.shape(b)
    tolerance = TOLERANCE[np.dtype(dtype).char]
    np.testing.assert_allclose(a, b, tolerance, tolerance * max(1, np.abs(b).max(initial=0)))


def differentiate(f, xs, gy, eps):
    """Return the gradient of ``sum(f(*xs) * gy)`` for each of ``xs``, by central differences."""
    grads = []
    for i, x in enumerate(xs):
        grads.append(grad := np.zeros(x.shape))
        for index in np.ndindex(x.shape):
            step = np.zeros(x.shape)
            step[index] = eps
            up, down = (f(*xs[:i], moved, *xs[i + 1:]) for moved in (x + step, x - step))
            grad[index] = ((up - down) * gy).sum() / (2 * eps)
    return grads


def check_with_reference(function, reference, *xs, dtype='d', needed=None, eps=1.):
    """Compare ``function`` of Chainer with ``reference``, and its gradients with differences.

    Those of the inputs that are not ``needed`` are arrays rather than Variables.
    """
    needed = needed or [True] * len(xs)
    given = [chainer.Variable(x) if need else x for x, need in zip(xs, needed, strict=True)]
    exact = [x.astype('d') for x in xs]
    y = function(*given)
    compare(y, reference(*exact), dtype)
    y.grad = gy = draw(*y.shape, dtype=y.dtype, seed=1)
    y.backward()
    for x, grad in zip(given, differentiate(reference, exact, gy, eps), strict=True):
        if isinstance(x, chainer.Variable):
            assert x.grad.dtype == x.dtype
            compare(x.grad, grad, dtype)
    return y


@pytest.fixture(scope='session', autouse=True)
def _kernels():
    """Import PyTorch's kernels first: their imports add filters, and warnings appear again."""
    if importlib.util.find_spec('torch'):
        for module in pkgutil.iter_modules(kernels.__path__):
            importlib.import_module(f'{kernels.__name__}.{module.name}')


@pytest.fixture
def normal():
    """``normal(2, 3, dtype='f', seed=1)`` is an array of numbers of the normal distribution."""
    return draw


@pytest.fixture
def close():
    """``close(a, b, 'f')`` compares with the accuracy that computing in float32 has."""
    return compare


@pytest.fixture
def derivatives():
    return differentiate


@pytest.fixture
def check():
    """``check(F.some_function, the_same_in_numpy, *inputs)`` compares outputs and gradients."""
    return check_with_reference
