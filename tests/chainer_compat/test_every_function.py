"""Every Chainer function runs without a warning, and its first two derivatives are right.

Warnings are errors in these tests. Derivatives are compared with finite differences, and results
with NumPy where it has the same function; test_references.py has more tests of the patched ones.
"""

import functools
import inspect
import itertools
import warnings

import chainer
import chainer.functions as F
import numpy as np
import pytest
import scipy.special
from calls_of_functions import CASES, DEPRECATED, FLOAT32, NOT_FLOAT16, ONCE, OPTIONS, Draw
from chainer.utils import type_check
from each_case import each_case

pytestmark = pytest.mark.mpi_skip

IN_NUMPY = '''
    absolute add arccos arcsin arctan arctan2 arctanh average broadcast_to ceil clip cos
    cosh cumprod cumsum diagonal dstack einsum exp expand_dims expm1 flip fliplr flipud floor fmod
    hstack log log10 log1p log2 matmul max maximum mean min minimum moveaxis pad prod repeat
    reshape rollaxis sign sin sinh sqrt square squeeze stack sum swapaxes tan tanh tensordot tile
    transpose vstack where argmax argmin
'''
IN_SCIPY = '''
    digamma erf erfc erfcinv erfcx erfinv log_ndtr logsumexp ndtr ndtri polygamma zeta
'''

NAMESAKES = {
    **{name: getattr(np, name) for name in IN_NUMPY.split()},
    **{name: getattr(scipy.special, name) for name in IN_SCIPY.split()},
    'batch_det': np.linalg.det, 'batch_inv': np.linalg.inv, 'cholesky': np.linalg.cholesky,
    'concat': lambda xs: np.concatenate(xs, 1), 'det': np.linalg.det, 'fix': np.trunc,
    'flatten': np.ravel, 'inv': np.linalg.inv, 'lgamma': scipy.special.gammaln,
    'linear': lambda x, w, b: x @ w.T + b, 'rsqrt': lambda x: 1 / np.sqrt(x),
    'sigmoid': scipy.special.expit, 'relu': lambda x: np.maximum(x, 0),
    'log_softmax': lambda x: scipy.special.log_softmax(x, 1),
    'softmax': lambda x: scipy.special.softmax(x, 1),
    'fft': lambda x: (y := np.fft.fft(x[0] + 1j * x[1]), (y.real, y.imag))[1],
    'ifft': lambda x: (y := np.fft.ifft(x[0] + 1j * x[1]), (y.real, y.imag))[1],
}


def test_every_function_has_a_case():
    public = {name for name, f in inspect.getmembers(F, callable) if not name.startswith('_')}
    assert public - DEPRECATED == set(CASES)


def run(name, v, twice, is_complete=True):
    """Return [(a sum over the outputs, its gradients), (a sum over those, its gradients)].

    The last gradients are None unless ``is_complete``.
    """
    np.random.seed(0)  # for dropout and others that draw numbers of their own
    ys = CASES[name](getattr(F, name), v)
    ys = [y for y in (ys if isinstance(ys, list | tuple) else [ys])
          if isinstance(y, chainer.Variable) and y.dtype.kind == 'f' and y.requires_grad]
    if not ys or ys[0].creator is None:
        return []
    sums = [sum(F.sum(y * y) for y in ys)]
    gradients = []
    for _ in range(is_complete + twice):
        for x in v.inputs:
            x.cleargrad()
        sums[-1].backward(enable_double_backprop=twice)
        gs = [x.grad_var for x in v.inputs]
        assert any(g is not None for g in gs)
        gradients.append([None if g is None else g.array for g in gs])
        if not any(g is not None and g.creator is not None for g in gs):
            break
        sums.append(sum(F.sum(g * g) for g in gs if g is not None))
    gradients += [None] * (not is_complete and len(sums) > len(gradients))
    return [(float(s.array), g) for s, g in zip(sums, gradients, strict=False)]


class Wrong(Draw):
    """Changes one of the inputs."""

    def __init__(self, index, change):
        super().__init__()
        self.index, self.change = index, change

    def __call__(self, *shape):
        drawn = super().__call__(*shape)
        changed = len(self.inputs) == self.index + 1
        return chainer.Variable(self.change(drawn.array)) if changed else drawn


WRONG = {
    'shorter': lambda x: x[:-1] if x.ndim else x,
    'one axis more': lambda x: x[None],
    'of other precision': lambda x: x.astype('d'),
}


@each_case('name', sorted(CASES))
def test_in_float32(name):
    """No warnings; the check of types fails with its own error, which shows shapes and dtypes."""
    v = Draw()
    run(name, v, name not in ONCE.split())
    for index, change in itertools.product(range(min(len(v.inputs), 3)), WRONG.values()):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            try:
                CASES[name](getattr(F, name), Wrong(index, change))
            except Exception as error:
                assert 'An Expr instance cannot be evaluated' not in str(error), name


def test_the_error_of_wrong_inputs():
    for labels in np.zeros(2, 'i'), np.zeros(4, 'i'), np.zeros((3, 2), 'i'):
        with pytest.raises(type_check.InvalidType, match='Expect'):
            F.softmax_cross_entropy(np.ones((3, 4), 'f'), labels)


@each_case('name', sorted(CASES))
def test_derivatives(name):
    dtype, eps, tolerance = ('f', 1e-3, 2e-2) if name in FLOAT32.split() else ('d', 1e-5, 1e-5)
    twice = name not in ONCE.split()
    middle, low, high = (Draw(dtype, step) for step in (0, -eps, eps))
    found = [run(name, v, twice, v is middle) for v in (middle, low, high)]
    for (_, gradients), (below, _), (above, _) in zip(*found, strict=True):
        slope = sum((g * d).sum() for g, d in zip(gradients, middle.directions, strict=True)
                    if g is not None)
        np.testing.assert_allclose(slope, (above - below) / (2 * eps), tolerance, tolerance / 100)


def pooling_of_valid_elements(v):
    return F.average_pooling_nd(v(2, 3, 4, 4), 2, 1, 1, pad_value=None)


@each_case('call', [pooling_of_valid_elements, *(
    functools.partial(case, getattr(F, name)) for name, case in sorted(CASES.items()))])
def test_backward_changes_no_gradient_that_it_gets(call):
    """Other functions may get the same array; and a second backward needs all arrays again."""
    np.random.seed(0)
    v = Draw()
    ys = call(v)
    ys = [y for y in (ys if isinstance(ys, list | tuple) else [ys])
          if isinstance(y, chainer.Variable) and y.dtype.kind == 'f' and y.creator is not None]
    found = []
    for _ in range(2 * bool(ys)):
        for x in v.inputs:
            x.cleargrad()
        gradients = [np.full_like(y.array, .5) for y in ys]
        chainer.backward(ys, [*map(chainer.Variable, gradients)])
        assert all((gradient == .5).all() for gradient in gradients)
        found.append([np.array(x.grad) for x in v.inputs if x.grad is not None])
    for first, second in zip(*found, strict=True) if found else ():
        np.testing.assert_allclose(second, first, 1e-6, 1e-7)


def dtypes(name, dtype, scalar):
    """Return the dtypes of outputs and gradients, and how many options are of type ``scalar``."""
    f = getattr(F, name)
    n_options = 0

    def converted(x):
        nonlocal n_options
        n_options += type(x) is float
        return scalar(x) if type(x) is float else x

    def call(*args, **options):
        parameters = inspect.signature(f).parameters
        for key, parameter in list(parameters.items())[len(args):]:
            if type(parameter.default) is float:
                options.setdefault(key, parameter.default)
        return f(*map(converted, args),
                 **{key: converted(x) for key, x in {**OPTIONS.get(name, {}), **options}.items()})

    v = Draw(dtype)
    ys = CASES[name](call, v)
    if n_options == 0:
        return [], 0
    ys = [y for y in (ys if isinstance(ys, list | tuple) else [ys])
          if isinstance(y, chainer.Variable)]
    found = [y.dtype for y in ys]
    for _ in range(1 + (name not in ONCE.split())):
        ys = [y for y in ys if y is not None and y.creator is not None]
        if ys and v.inputs:
            ys = chainer.grad(ys, v.inputs, [chainer.Variable(np.ones_like(y.array)) for y in ys],
                              enable_double_backprop=True)
            found += [None if y is None else y.dtype for y in ys]
    return found, n_options


def test_options_can_be_numpy_scalars():
    n_options = 0
    # With NumPy 2, an array of the first type and a scalar of the second give the second type.
    for name, (dtype, scalar) in itertools.product(CASES, [('e', np.float32), ('f', np.float64)]):
        if dtype == 'e' and name in [*FLOAT32.split(), *NOT_FLOAT16]:
            continue
        expected, n = dtypes(name, dtype, float)
        n_options += n
        if n:
            assert dtypes(name, dtype, scalar) == (expected, n), name
    assert n_options > 80


def arrays(x):
    """Return ``x`` with arrays for Variables, also in lists and tuples."""
    if isinstance(x, list | tuple):
        return type(x)(map(arrays, x))
    return x.array if isinstance(x, chainer.Variable) else x


@each_case('name', sorted(NAMESAKES))
def test_same_as_in_numpy(name):
    def namesake(*args, **options):
        return NAMESAKES[name](*map(arrays, args), **{k: arrays(x) for k, x in options.items()})

    y = CASES[name](getattr(F, name), Draw('d'))
    expected = CASES[name](namesake, Draw('d'))
    np.testing.assert_allclose(arrays(y), expected, 1e-6, 1e-8)
