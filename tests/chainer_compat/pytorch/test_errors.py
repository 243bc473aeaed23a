"""Invalid arguments raise the same errors with PyTorch's kernels as without them."""

import itertools

import chainer
import chainer.functions as F
import numpy as np
import pytest
from each_case import each_case
from kernel_cases import Inputs, draw

pytest.importorskip('torch')

pytestmark = pytest.mark.mpi_skip


def options(function, shapes, *values):
    """Return a case for each of some options."""
    return [lambda v, value=value: function(*(v(*shape) for shape in shapes), **value)
            for value in values]


def of(name, *values):
    return [{name: value} for value in values]


CONVOLUTION = [*of('stride', 0, -1, (1, 0), 100), *of('pad', -1, -3, 4), *of('dilate', 0, -1, 4),
               *of('groups', 0, -1, 2, 3)]
POOLING = [{'ksize': 2} | value for value in [
    *of('ksize', 0, -1, 9, (2,), (2, 2, 2)), *of('stride', 0, -1), *of('pad', -1, 2)]]
STATISTICS = [dict(zip(('running_mean', 'running_var'), pair, strict=True)) for pair in [
    (np.zeros(4, 'f'), np.zeros(4, 'f')), (np.zeros(3, 'i'), np.zeros(3, 'i')),
    (np.zeros(3, 'f'), None), (None, np.zeros(3, 'f')), (np.zeros(1, 'f'), np.zeros(1, 'f'))]]

INVALID_OPTIONS = [
    *options(F.convolution_2d, [(2, 4, 6, 5), (4, 4, 3, 2), (4,)], *CONVOLUTION),
    *options(F.convolution_nd, [(2, 4, 6), (4, 4, 3), (4,)], *CONVOLUTION),
    *options(F.deconvolution_2d, [(2, 4, 6, 5), (4, 4, 3, 2), (4,)], *CONVOLUTION,
             *of('outsize', (3, 3), (-1, 4), (0, 0), (8,)), {'pad': 9}),
    *options(F.deconvolution_nd, [(2, 4, 6), (4, 4, 3), (4,)], *CONVOLUTION,
             *of('outsize', (3,), (-1,), (0,)), {'pad': 9}),
    *options(F.max_pooling_2d, [(2, 3, 6, 5)], *POOLING),
    *options(F.average_pooling_2d, [(2, 3, 6, 5)], *POOLING),
    *options(F.log_softmax, [(2, 3, 4)], *of('axis', 3, -4, None, 'a', (0, 1))),
    *options(F.leaky_relu, [(3, 4)], *of('slope', 'a', None, 1j, np.array([.2, .3]))),
    *options(F.batch_normalization, [(4, 3, 5), (3,), (3,)],
             *of('axis', 0, (0, 1), (2, 0), 3, (0, 5), ()),
             *({'axis': (0, 2)} | value for value in [*of('eps', 'a', None), *STATISTICS])),
    *[lambda v, ids=ids, ignored=ignored: F.embed_id(ids, v(4, 3), ignored)
      for ids in (np.array([4], 'i'), np.array([-5], 'i'), np.array([-1], 'i'),
                  np.array([1.], 'f'), np.array([1], 'u4'), np.array([True]))
      for ignored in (None, 7, -5)],
    *[lambda v, labels=labels: F.softmax_cross_entropy(v(2, 4), labels)
      for labels in (np.array([1], 'i'), np.array([1, 4], 'i'), np.array([1, -2], 'i'),
                     np.array([1, 2, 3], 'i'), np.array([[1, 2]], 'i'), np.zeros((2, 3), 'f'))],
]


def outcome(case, v, mode):
    """Return the type of the error, forward or backward; otherwise the results and gradients."""
    where = 'forward'
    with chainer.using_config('use_torch', mode), np.errstate(all='ignore'):
        try:
            ys = case(v)
            where = 'backward'
            ys = ys if isinstance(ys, list | tuple) else [ys]
            sum(F.sum(F.sin(y)) for y in ys).backward()
        except Exception as error:  # also a warning that a kernel failed
            return where, type(error)
    return [y.array for y in ys] + [getattr(x, 'grad', None) for x in v.drawn]


def compare(case, make_inputs):
    expected = outcome(case, make_inputs(), 'never')
    found = outcome(case, make_inputs(), 'auto')
    if isinstance(expected, tuple) or isinstance(found, tuple):
        assert found == expected
        return
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@each_case('number', range(len(INVALID_OPTIONS)))
def test_options(number):
    compare(INVALID_OPTIONS[number], lambda: Inputs('f'))


def test_without_type_checks():
    """PyTorch's batch normalization would read beyond the end of short arrays."""
    x, of_3, of_1000 = draw(4, 1000, dtype='f'), draw(3, dtype='f'), draw(1000, dtype='f')
    with chainer.using_config('type_check', False):
        for gamma, beta in itertools.permutations([of_3, of_1000]):
            errors = []
            for mode in 'never', 'auto':
                with chainer.using_config('use_torch', mode), pytest.raises(Exception) as error:
                    F.batch_normalization(x, gamma, beta)
                errors.append(error.type)
            assert errors[0] == errors[1]


@pytest.mark.parametrize('dtype', ['i4', 'i8', 'u1'])
def test_integers_without_type_checks(dtype):
    x = chainer.Variable(np.array([[3, 0, 5]], dtype))
    with chainer.using_config('type_check', False):
        y = F.relu(x)
    assert y.dtype == dtype
    assert y.array.tolist() == [[3, 0, 5]]


def test_a_kernel_that_fails(monkeypatch):
    """Chainer computes the result, with a warning."""
    from chainer_compat.pytorch import dispatch
    from chainer_compat.pytorch.kernels import activation

    def fail(*args):
        raise RuntimeError('not for this processor')

    monkeypatch.setattr(activation, 'relu', fail)
    relu = dispatch.with_kernel('activation.relu')(lambda f, inputs: 'the result of Chainer')
    with pytest.warns(UserWarning, match='kernel activation.relu failed, so Chainer computed the '
                                         r'result instead \(CHAINER_USE_TORCH=never .*: '
                                         'RuntimeError: not for this processor'):
        assert relu(None, None) == 'the result of Chainer'
