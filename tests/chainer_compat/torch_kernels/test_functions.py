"""Every kernel computes what Chainer computes, or leaves it to Chainer.

``test_operands.py`` has more layouts of inputs.
"""

import chainer
import chainer.functions as F
import numpy as np
import pytest
from each_case import each_case
from kernel_cases import IDS, draw

from chainermn.functions import _batch_norm_on_host as on_host

torch = pytest.importorskip('torch')

pytestmark = pytest.mark.mpi_skip

T = np.array([1, 0, -1, 3], 'i')


def convolved(function, x, W, n_out, **options):
    """Return cases without and with a bias."""
    return [lambda v: function(v(*x), v(*W), **options),
            lambda v: function(v(*x), v(*W), v(n_out), **options)]


def of_options(function, shape, *options):
    return [lambda v, each=each: function(v(*shape), *each) for each in options]


#: Cases by the operators of PyTorch that compute them, forward and backward, in float32 and 64.
BY_PYTORCH = {
    ('convolution', 'convolution_backward'): [
        *convolved(F.convolution_2d, (2, 3, 7, 8), (4, 3, 3, 3), 4),
        *convolved(F.convolution_2d, (2, 3, 7, 8), (4, 3, 3, 2), 4, stride=2, pad=1),
        *convolved(F.convolution_2d, (1, 3, 7, 8), (4, 3, 1, 1), 4, stride=(1, 3), pad=(2, 0)),
        *convolved(F.convolution_2d, (2, 4, 9, 8), (6, 2, 3, 3), 6, stride=2, pad=1, dilate=2,
                   groups=2),
        *convolved(F.convolution_2d, (2, 4, 9, 8), (4, 1, 3, 3), 4, pad=1, dilate=(1, 2), groups=4),
        # The same number of outputs as without cover_all.
        *convolved(F.convolution_2d, (2, 3, 7, 7), (4, 3, 3, 3), 4, stride=2, cover_all=True),
        *convolved(F.deconvolution_2d, (2, 3, 7, 8), (3, 4, 3, 3), 4),
        *convolved(F.deconvolution_2d, (2, 3, 7, 8), (3, 4, 3, 2), 4, stride=2, pad=1),
        *convolved(F.deconvolution_2d, (2, 3, 7, 8), (3, 4, 3, 3), 4, stride=2, pad=1,
                   outsize=(14, 16)),
        *convolved(F.deconvolution_2d, (2, 3, 7, 8), (3, 2, 3, 3), 6, dilate=2, groups=3),
        *[case for n in (1, 3) for groups in (1, 2)
          for function in (F.convolution_nd, F.deconvolution_nd)
          for case in convolved(function, (2, 4, *(5, 6, 4)[:n]), (4, 4 // groups, *[3] * n),
                                4, stride=2, pad=1, groups=groups)]],
    ('addmm', 'mm'): [
        lambda v: F.linear(v(4, 3), v(5, 3), v(5)), lambda v: F.linear(v(0, 3), v(5, 3), v(5)),
        lambda v: F.linear(v(4, 0), v(5, 0), v(5))],
    ('mm',): [lambda v: F.linear(v(4, 3), v(5, 3))],
    ('native_batch_norm', 'native_batch_norm_backward'): [
        lambda v: F.batch_normalization(v(4, 3, 5, 5), v(3), v(3), axis=(0, 2, 3)),
        lambda v: F.batch_normalization(v(4, 3), v(3), v(3), axis=0),
        lambda v: F.batch_normalization(v(4, 3, 5), v(3, 5), v(3, 5)),
        lambda v: F.batch_normalization(v(1, 3, 5, 5), v(3), v(3), axis=(0, 2, 3)),
        lambda v: F.batch_normalization(v(4, 3, 5), v(3), v(3), axis=(0, 2))],
    ('mul_',): [  # only the last step
        lambda v: F.batch_normalization(v(4, 3, 5), v(5), v(5), axis=(0, 1)),
        lambda v: F.batch_normalization(v(1, 3), v(3), v(3)),
        *[lambda v, shape=shape: F.fixed_batch_normalization(
            v(*shape), v(3), v(3), v(3), v(3) ** 2 + 1) for shape in ((4, 3, 5, 5), (4, 3))]],
    ('max_pool2d_with_indices', 'max_pool2d_with_indices_backward'): [
        *of_options(F.max_pooling_2d, (2, 3, 8, 8), (2, 2, 0, False), (3, 2, 1, True)),
        *of_options(F.max_pooling_2d, (2, 3, 7, 8), ((2, 3), (1, 2), (1, 0), False)),
        *of_options(F.max_pooling_2d, (1, 1, 7, 9), (3, 3, 0, True)),
        lambda v: F.max_pooling_2d(v(1, 2, 4, 4) * 0, 2, 2)],  # ties
    ('avg_pool2d', 'avg_pool2d_backward'): of_options(
        F.average_pooling_2d, (2, 3, 7, 8), (2,), (3, 2, 1), ((2, 3), (1, 2), (1, 0))),
    ('relu', 'leaky_relu_backward'): [
        lambda v, shape=shape: F.relu(v(*shape)) for shape in ((3, 4), (0, 4), ())],
    ('leaky_relu', 'leaky_relu_backward'): [
        lambda v, shape=shape, slope=slope: F.leaky_relu(v(*shape), slope)
        for slope in (.2, 0, -.5, np.float32(.3)) for shape in ((3, 4), (0, 4), ())],
    ('_softmax', '_softmax_backward_data'): [
        *of_options(F.softmax, (3, 4), (), (0,), (-1,)),
        *of_options(F.softmax, (2, 3, 4, 5), (), (-3,), (3,), (0,)),
        lambda v: F.softmax(v(0, 4)), lambda v: F.softmax(v(3, 4) * 1000)],
    ('_log_softmax',): [
        lambda v: F.log_softmax(v(3, 4)), lambda v: F.log_softmax(v(2, 3, 4)),
        lambda v: F.log_softmax(v(2, 3, 4), axis=-1),
        lambda v: F.softmax_cross_entropy(v(4, 4), T, enable_double_backprop=True)],
}
#: Chainer has no second derivatives of these, or they are no numbers.
BY_PYTORCH_ONCE = {
    ('_log_softmax',): [
        lambda v: F.log_softmax(v(0, 4)), lambda v: F.log_softmax(v(3, 4) * 1000),
        lambda v: F.softmax_cross_entropy(v(4, 4), T),
        lambda v: F.softmax_cross_entropy(v(4, 4), T, reduce='no'),
        lambda v: F.softmax_cross_entropy(v(4, 4), T, normalize=False),
        lambda v: F.softmax_cross_entropy(v(4, 4), T, class_weight=np.arange(1, 5, dtype=v.dtype))],
    ('pow',): [
        *of_options(F.local_response_normalization, (2, 7, 3, 4), (), (3, 1., .1, .5), (1,),
                    (5, 1, 1, 1), (16,)),
        lambda v: F.local_response_normalization(v(2, 5)),
        lambda v: F.local_response_normalization(v(0, 5, 2, 2))],
    ('mul_',): [lambda v: F.fixed_batch_normalization(v(0, 3), v(3), v(3), v(3), v(3) ** 2 + 1)],
    ('embedding_dense_backward',): [
        lambda v, ids=ids, ignored=ignored: F.embed_id(ids, v(5, 3), ignored)
        for ids, ignored in ((IDS - 1, -1), (np.array([0, 4, 4], 'i8'), 4),
                             (np.array([3, 3, 3], 'i'), None))],
}
#: PyTorch runs no operator in float64 either.
BY_CHAINER = [
    lambda v: F.convolution_2d(v(0, 3, 7, 8), v(4, 3, 3, 3), v(4)),
    lambda v: F.convolution_2d(v(2, 3, 7, 8), v(4, 3, 3, 3), stride=2, cover_all=True),
    lambda v: F.deconvolution_2d(v(0, 3, 4, 4), v(3, 2, 3, 3)),
    lambda v: F.convolution_nd(v(1, 2, 3, 3, 3, 3), v(2, 2, 2, 2, 2, 2)),
    lambda v: F.max_pooling_2d(v(2, 3, 8, 8), 3, 2, 2, False),  # more padding than PyTorch allows
    lambda v: F.max_pooling_1d(v(2, 3, 8), 2),
    lambda v: F.max_pooling_3d(v(2, 3, 4, 4, 4), 2),
    lambda v: F.average_pooling_2d(v(2, 3, 7, 8), 2, 2, 2),
    lambda v: F.average_pooling_2d(v(0, 3, 8, 8), 2),
    lambda v: F.embed_id(np.array([-1, 0], 'i'), v(5, 3)),  # the last row
]
#: In float16, or of several dtypes.
OF_OTHER_DTYPES = [
    lambda v: F.convolution_2d(v(2, 3, 7, 8), v(4, 3, 3, 3), v(4)),
    lambda v: F.cast(F.convolution_2d(
        F.cast(v(2, 3, 7, 8), 'f'), F.cast(v(4, 3, 3, 3), 'd')), 'e'),
    lambda v: F.deconvolution_2d(v(2, 3, 4, 4), v(3, 2, 3, 3)),
    lambda v: F.linear(v(4, 3), v(5, 3), v(5)),
    lambda v: F.linear(F.cast(v(4, 3), 'f'), F.cast(v(5, 3), 'd'), F.cast(v(5), 'f')),
    lambda v: F.batch_normalization(v(4, 3), F.cast(v(3), 'f'), F.cast(v(3), 'f')),
    lambda v: F.max_pooling_2d(v(2, 3, 8, 8), 2), lambda v: F.average_pooling_2d(v(2, 3, 8, 8), 2),
    lambda v: F.local_response_normalization(v(2, 5, 3, 3)),
    lambda v: F.relu(v(3, 4)), lambda v: F.leaky_relu(v(3, 4)), lambda v: F.log_softmax(v(3, 4)),
    lambda v: F.softmax(v(3, 4)), lambda v: F.softmax_cross_entropy(v(4, 4), T),
    lambda v: F.embed_id(IDS, v(5, 3)),
]


def flat(table):
    return [(names, case) for names, cases in table.items() for case in cases]


@pytest.mark.filterwarnings('ignore:A batch with no more than one sample')
@each_case('operators, case, dtype, second', [
    *[(names, case, dtype, second) for table, second in (
        (BY_PYTORCH, True), (BY_PYTORCH_ONCE, False))
      for names, case in flat(table) for dtype in 'fd'],
    *[((), case, 'd', True) for case in BY_CHAINER],
    *[((), case, 'e', False) for case in OF_OTHER_DTYPES]])
def test_values_and_gradients(agree_on, operators, case, dtype, second):
    agree_on(case, dtype, runs=operators, second=second)


def test_errors_of_convolutions():
    x, W = draw(2, 3, 2, 2), draw(4, 3, 3, 3)
    for f, args in (F.convolution_2d, (x, W)), (F.convolution_2d, (x[:, :2], W)):
        messages = []
        for mode in 'never', 'auto':
            with chainer.using_config('use_torch', mode), pytest.raises(Exception) as error:
                f(*args)
            messages.append((error.type, str(error.value)))
        assert messages[0] == messages[1]


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


def test_parts_of_multi_node_batch_normalization_by_numpy(operators):
    """Of no samples, of float16, and over other axes."""
    expander = (None, slice(None))
    with operators() as names:
        for x, axis in [(draw(0, 3, dtype='f'), (0,)), (draw(4, 3, dtype='e'), (0,)),
                        (draw(3, 4, dtype='f').T, (1,))]:
            on_host.statistics(x, axis, expander, np.dtype('f'))
    assert not names


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
