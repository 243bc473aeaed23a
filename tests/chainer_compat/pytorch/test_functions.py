"""Every kernel computes what Chainer computes, or leaves it to Chainer."""

import importlib

import chainer
import chainer.functions as F
import numpy as np
import pytest
from each_case import each_case
from kernel_cases import CASES, ONCE, draw

from chainermn.functions import _batch_norm_on_host as on_host

torch = pytest.importorskip('torch')

pytestmark = pytest.mark.mpi_skip

#: PyTorch runs no operator, even in float64.
BY_CHAINER = [
    lambda v: F.convolution_2d(v(0, 3, 7, 8), v(4, 3, 3, 3), v(4)),
    lambda v: F.convolution_2d(v(2, 3, 7, 8), v(4, 3, 3, 3), stride=2, cover_all=True),
    lambda v: F.convolution_nd(v(1, 2, 3, 3, 3, 3), v(2, 2, 2, 2, 2, 2)),
    lambda v: F.max_pooling_2d(v(2, 3, 8, 8), 3, 2, 2, False),  # more padding than PyTorch allows
    lambda v: F.max_pooling_1d(v(2, 3, 8), 2),
    lambda v: F.average_pooling_2d(v(0, 3, 8, 8), 2),
    lambda v: F.embed_id(np.array([-1, 0], 'i'), v(5, 3)),  # the last row
]


@pytest.mark.filterwarnings('ignore:A batch with no more than one sample')
@each_case('case, dtype, is_used', [
    *[(case, 'd', True) for case in CASES if case not in ONCE],
    *[(case, 'd', False) for case in BY_CHAINER],
    *[(case, 'e', False) for case in CASES if case not in ONCE]])
def test_values_and_gradients(agree_on, case, dtype, is_used):
    """Also second gradients; a law compares more calls."""
    agree_on(case, dtype, is_used=is_used, second=dtype == 'd')


def test_linear_in_a_static_graph():
    """A static graph repeats the functions of its first call with other inputs."""
    from chainer import static_graph

    class Model(chainer.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.fc = chainer.links.Linear(3, 2)

        @static_graph
        def __call__(self, x):
            return self.fc(x)

    model = Model()
    for seed in range(3):
        x = draw(4, 3, dtype='f', seed=seed)
        y = model(chainer.Variable(x))
        np.testing.assert_allclose(y.array, x.dot(model.fc.W.array.T), rtol=1e-4, atol=1e-6)


def test_parts_of_multi_node_batch_normalization(operators):
    """As NumPy computes them: with statistics of other ranks, and a mean far from zero."""
    for dtype in 'fd':
        for shape, axis in [((4, 3, 5, 6), (0, 2, 3)), ((4, 3), (0,)), ((4, 3, 5), (0,)),
                            ((1, 3, 2), (0, 2))]:
            x, gy = draw(*shape, dtype=dtype) + 50, draw(*shape, dtype=dtype, seed=1)
            of_channels = [n for i, n in enumerate(shape) if i not in axis]
            mean, inv_std, gamma = (abs(draw(*of_channels, dtype=dtype, seed=n)) + offset
                                    for n, offset in ((2, 50), (3, 1), (4, 0)))
            sums, total = draw(2, *of_channels, dtype=dtype), np.array(100, dtype)
            expander = tuple(None if i in axis else slice(None) for i in range(len(shape)))
            for part, operator, args in [
                    (on_host.statistics, 'batch_norm_update_stats',
                     (x, axis, expander, np.dtype(dtype))),
                    (on_host.gradient_sums, 'native_batch_norm_backward',
                     (gy, x, axis, expander, mean, inv_std, np.dtype(dtype))),
                    (on_host.input_gradient, 'addcmul_',
                     (gy, x, expander, mean, inv_std, gamma, sums, total))]:
                _compare(operators, part, operator, args, {'f': 1e-4, 'd': 1e-10}[dtype])


def _compare(operators, part, operator, args, tolerance):
    with operators() as names, chainer.using_config('use_torch', 'never'):
        expected = part(*args)
    assert not names
    with operators() as names:
        found = part(*args)
    assert operator in names
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_allclose(found, expected, rtol=tolerance,
                               atol=tolerance * abs(expected).max())


def test_running_statistics():
    for shape, x in [((3,), draw(4, 3, 5, 5)), ((3,), draw(2, 3)), ((3, 5), draw(4, 3, 5))]:
        found = {}
        for mode in 'never', 'auto':
            mean, var = np.full(shape, .5), np.full(shape, 2.)
            with chainer.using_config('use_torch', mode):
                for _ in range(2):
                    F.batch_normalization(x, draw(*shape), draw(*shape), running_mean=mean,
                                          running_var=var, decay=.7)
            found[mode] = mean, var
        np.testing.assert_allclose(found['auto'], found['never'], rtol=1e-12)
    # Updates reach every view, and read-only statistics are an error as in Chainer.
    columns = np.zeros((3, 2))
    F.batch_normalization(draw(4, 3), draw(3), draw(3), running_mean=columns[:, 0],
                          running_var=columns[:, 1])
    assert columns.all()
    columns.flags.writeable = False
    with pytest.raises(ValueError, match='read-only'):
        F.batch_normalization(draw(4, 3), draw(3), draw(3), running_mean=columns[:, 0].T,
                              running_var=columns[:, 1])


def test_padding_that_pytorch_omits():
    padding = F.max_pooling_2d(draw(1, 1, 4, 4), 2, 3, 1, cover_all=True)
    assert padding.shape == (1, 1, 3, 3) and np.isneginf(padding.array[0, 0, 2]).all()


def test_indices_of_max_pooling(operators):
    x = draw(2, 3, 7, 9)
    for ksize, stride, pad, cover_all in [(2, 2, 0, True), (3, 2, 1, True), (3, 2, 1, False),
                                          ((2, 3), (2, 1), (1, 0), False)]:
        found = {}
        for mode in 'never', 'auto':
            with chainer.using_config('use_torch', mode), operators() as names:
                y, indices = F.max_pooling_2d(x, ksize, stride, pad, cover_all, True)
                up = F.upsampling_2d(y, indices, ksize, stride, pad, x.shape[2:], cover_all)
            assert bool(names) == (mode == 'auto')
            found[mode] = y.array, indices, up.array
        for a, b in zip(found['auto'], found['never'], strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def test_the_mode_changes_between_forward_and_backward():
    found = []
    for forward, backward in [('never', 'never'), ('auto', 'never'), ('never', 'auto')]:
        x, W = chainer.Variable(draw(2, 3, 7, 9)), chainer.Variable(draw(4, 3, 3, 3))
        with chainer.using_config('use_torch', forward):
            y = F.batch_normalization(F.convolution_2d(x, W), draw(4), draw(4))
            y = F.average_pooling_2d(F.max_pooling_2d(F.relu(y), 2), 2)
            loss = F.sum(y * y)
        with chainer.using_config('use_torch', backward):
            loss.backward()
        found.append((x.grad, W.grad))
    for grads in found[1:]:
        for a, b in zip(grads, found[0], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_special_values_in_functions():
    """Forward and backward, with several of them in one window."""
    nan, inf = np.nan, np.inf
    x = np.array([[1, nan, -2, nan], [nan, -1, inf, 0], [-inf, -inf, 3, -0.], [-inf, -inf, nan, 1]],
                 'f')[None, None]
    gy = np.array([[1, 2, nan, inf], [3, 4, -inf, 5], [nan, 6, 7, inf], [8, nan, 9, -1]],
                  'f')[None, None]
    for f in [F.leaky_relu, lambda x: F.leaky_relu(x, 0), lambda x: F.leaky_relu(x, -.5),
              lambda x: F.max_pooling_2d(x, 2), lambda x: F.max_pooling_2d(x, 3, 1, 1),
              lambda x: F.average_pooling_2d(x, 2), F.log_softmax]:
        results = []
        for mode in 'never', 'auto':
            v = chainer.Variable(x)
            with chainer.using_config('use_torch', mode), np.errstate(all='ignore'):
                y = f(v)
                y.grad = gy[..., :y.shape[2], :y.shape[3]].copy()
                y.backward()
            results.append((y.array, v.grad))
        for a, b in zip(*results, strict=True):
            np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
            np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize('shape', [(), (3,), (2, 3, 4, 5)])
@pytest.mark.parametrize('dtype', 'fd')
def test_tanh_of_numpy(shape, dtype, monkeypatch):
    """Processors with AVX-512 take it for large arrays."""
    activation = importlib.import_module('chainer_compat.pytorch.expressions.activation')
    monkeypatch.setattr(activation, '_MIN_TANH', 0)
    x = np.random.RandomState(0).standard_normal(shape).astype(dtype)
    if shape:
        x.ravel()[:3] = np.nan, np.inf, -np.inf
    x = np.moveaxis(x, 1, -1).copy() if x.ndim == 4 else x
    found = []
    for mode in 'auto', 'never':
        v = chainer.Variable(np.moveaxis(x, -1, 1) if x.ndim == 4 else x)
        with chainer.using_config('use_torch', mode):
            y = F.tanh(v * 2)
            y.grad = np.full_like(y.array, .5)
            y.backward()
        found.append([y.array, v.grad])
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, 1e-6, 1e-7)


def test_gradients_of_relu_are_zero_where_the_result_is():
    """Also infinite ones, as Chainer's on a GPU: ``inf * 0`` on the CPU is NaN."""
    x = np.array([[1, np.nan, -2, 0, -0., np.inf, -np.inf]], 'f')
    for gy in 1, np.inf, -np.inf, np.nan:
        v = chainer.Variable(x)
        y = F.relu(v)
        y.grad = np.full_like(x, gy)
        y.backward()
        np.testing.assert_array_equal(y.array, np.maximum(x, 0))
        np.testing.assert_array_equal(v.grad, np.where(x <= 0, 0, np.float32(gy)))
