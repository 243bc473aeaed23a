"""Every kernel computes what Chainer computes, or leaves it to Chainer."""

import chainer
import chainer.functions as F
import numpy as np
import pytest

from chainermn.functions import _batch_norm_on_host as on_host

torch = pytest.importorskip('torch')

pytestmark = pytest.mark.mpi_skip

BATCH_NORM = {'native_batch_norm', 'native_batch_norm_backward'}
MAX_POOL = {'max_pool2d_with_indices', 'max_pool2d_with_indices_backward'}
AVERAGE_POOL = {'avg_pool2d', 'avg_pool2d_backward'}
CONVOLUTION = {'convolution', 'convolution_backward'}


def draw(*shape, dtype='d', seed=0):
    return np.random.RandomState(seed).standard_normal(shape).astype(dtype)


def unusual(x):
    """Return arrays equal to ``x``: transposed, read-only, with negative and odd strides."""
    yield np.asfortranarray(x)
    read_only = x.copy()
    read_only.flags.writeable = False
    yield read_only
    yield x[::-1, ..., ::-1].copy()[::-1, ..., ::-1]
    fields = np.zeros(x.shape, [('flag', 'b'), ('value', x.dtype)])
    fields['value'] = x
    yield fields['value']


CONVOLUTIONS = [
    ((2, 3, 7, 8), (4, 3, 3, 3), {}),
    ((2, 3, 7, 8), (4, 3, 3, 2), {'stride': 2, 'pad': 1}),
    ((1, 3, 7, 8), (4, 3, 1, 1), {'stride': (1, 3), 'pad': (2, 0)}),
    ((2, 4, 9, 8), (6, 2, 3, 3), {'stride': 2, 'pad': 1, 'dilate': 2, 'groups': 2}),
    ((2, 4, 9, 8), (4, 1, 3, 3), {'pad': 1, 'dilate': (1, 2), 'groups': 4}),
]


def test_convolution_2d(agree):
    for x, W, options in CONVOLUTIONS:
        for dtype in 'fd':
            arrays = draw(*x, dtype=dtype), draw(*W, dtype=dtype), draw(W[0], dtype=dtype)
            for n in 2, 3:
                agree(lambda *args, options=options: F.convolution_2d(*args, **options),
                      *arrays[:n], runs=CONVOLUTION)


def test_convolution_2d_by_chainer(agree):
    x, W, b = draw(2, 3, 7, 8, dtype='f'), draw(4, 3, 3, 3, dtype='f'), draw(4, dtype='f')
    agree(F.convolution_2d, *(a.astype('e') for a in (x, W, b)), second=False)
    agree(F.convolution_2d, x, W.astype('d'), b, second=False)
    agree(F.convolution_2d, x[:0], W, b)
    agree(lambda *args: F.convolution_2d(*args, stride=2, cover_all=True), x, W, b)
    # The same number of outputs: PyTorch computes it.
    agree(lambda *args: F.convolution_2d(*args, stride=2, cover_all=True), x[..., :7], W, b,
          runs=CONVOLUTION)


def test_errors_of_convolutions():
    x, W = draw(2, 3, 2, 2), draw(4, 3, 3, 3)
    for f, args in (F.convolution_2d, (x, W)), (F.convolution_2d, (x[:, :2], W)):
        messages = []
        for mode in 'never', 'auto':
            with chainer.using_config('use_torch', mode), pytest.raises(Exception) as error:
                f(*args)
            messages.append((error.type, str(error.value)))
        assert messages[0] == messages[1]


def test_deconvolution_2d(agree):
    for dtype in 'fd':
        for W, options in [
            ((3, 4, 3, 3), {}),
            ((3, 4, 3, 2), {'stride': 2, 'pad': 1}),
            ((3, 4, 3, 3), {'stride': 2, 'pad': 1, 'outsize': (14, 16)}),
            ((3, 2, 3, 3), {'dilate': 2, 'groups': 3}),
        ]:
            arrays = (draw(2, 3, 7, 8, dtype=dtype), draw(*W, dtype=dtype),
                      draw(W[1] * options.get('groups', 1), dtype=dtype))
            for n in 2, 3:
                agree(lambda *args, options=options: F.deconvolution_2d(*args, **options),
                      *arrays[:n], runs=CONVOLUTION)
    agree(F.deconvolution_2d, draw(2, 3, 4, 4, dtype='e'), draw(3, 2, 3, 3, dtype='e'),
          second=False)
    agree(F.deconvolution_2d, draw(0, 3, 4, 4), draw(3, 2, 3, 3))


def test_other_dimensions(agree):
    for dims in 1, 3:
        size = (5, 6, 4)[:dims]
        for groups in 1, 2:
            options = {'stride': 2, 'pad': 1, 'groups': groups}
            W, b = draw(4, 4 // groups, *(3,) * dims), draw(4)
            agree(lambda *args, options=options: F.convolution_nd(*args, **options),
                  draw(2, 4, *size), W, b, runs=CONVOLUTION)
            agree(lambda *args, options=options: F.deconvolution_nd(*args, **options),
                  draw(2, 4, *size), W, draw(W.shape[1] * groups), runs=CONVOLUTION)
    agree(F.convolution_nd, draw(1, 2, 3, 3, 3, 3), draw(2, 2, 2, 2, 2, 2))


def test_linear(agree):
    for dtype in 'fd':
        x, W, b = draw(4, 3, dtype=dtype), draw(5, 3, dtype=dtype), draw(5, dtype=dtype)
        agree(F.linear, x, W, b, runs=['addmm', 'mm'])
        agree(F.linear, x, W, runs=['mm'])
        for variant in unusual(x):
            agree(F.linear, variant, W, b, runs=['addmm', 'mm'])
        for variant in unusual(W):
            agree(F.linear, x, variant, b, runs=['addmm', 'mm'])
    agree(F.linear, draw(0, 3), draw(5, 3), draw(5), runs=['addmm', 'mm'])
    agree(F.linear, draw(4, 0), draw(5, 0), draw(5), runs=['addmm', 'mm'])
    agree(F.linear, draw(4, 3, dtype='e'), draw(5, 3, dtype='e'), draw(5, dtype='e'), second=False)
    agree(F.linear, draw(4, 3, dtype='f'), draw(5, 3, dtype='d'), draw(5, dtype='f'), second=False)


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


def test_batch_normalization(agree):
    for dtype in 'fd':
        for x, statistics in [((4, 3, 5, 5), (3,)), ((4, 3), (3,)), ((4, 3, 5), (3, 5)),
                              ((1, 3, 5, 5), (3,)), ((4, 3, 5), (3,))]:
            axis = (0, *range(2, len(x))) if len(statistics) == 1 else None
            agree(lambda *args, axis=axis: F.batch_normalization(*args, axis=axis),
                  draw(*x, dtype=dtype), draw(*statistics, dtype=dtype),
                  draw(*statistics, dtype=dtype), runs=BATCH_NORM)
    gamma, beta = draw(5), draw(5)
    agree(lambda *args: F.batch_normalization(*args, axis=(0, 1)), draw(4, 3, 5), gamma, beta,
          runs=['mul_'])  # only the last step
    agree(F.batch_normalization, draw(4, 3, dtype='e'), draw(3, dtype='f'), draw(3, dtype='f'),
          second=False)


@pytest.mark.filterwarnings('ignore:A batch with no more than one sample')
def test_batch_normalization_of_one_sample(agree):
    agree(F.batch_normalization, draw(1, 3), draw(3), draw(3), runs=['mul_'])


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
            for variant in unusual(x):
                parts = [
                    (on_host.statistics, 'batch_norm_update_stats',
                     (variant, axis, expander, np.dtype(dtype))),
                    (on_host.gradient_sums, 'native_batch_norm_backward',
                     (gy, variant, axis, expander, mean, inv_std, np.dtype(dtype))),
                    (on_host.input_gradient, 'addcmul_',
                     (gy, variant, expander, mean, inv_std, gamma, sums, total)),
                ]
                for part, operator, args in parts:
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


def test_fixed_batch_normalization(agree):
    for shape in (4, 3, 5, 5), (4, 3), (0, 3):
        agree(lambda x, gamma, beta, mean, var: F.fixed_batch_normalization(
            x, gamma, beta, mean, var * var + 1), draw(*shape), draw(3), draw(3), draw(3), draw(3),
            runs=['mul_'], second=shape[0] > 0)


def test_max_pooling_2d(agree):
    for dtype in 'fd':
        for x, options in [
            ((2, 3, 8, 8), (2, 2, 0, False)), ((2, 3, 8, 8), (3, 2, 1, True)),
            ((2, 3, 7, 8), ((2, 3), (1, 2), (1, 0), False)), ((1, 1, 7, 9), (3, 3, 0, True)),
        ]:
            agree(lambda x, options=options: F.max_pooling_2d(x, *options),
                  draw(*x, dtype=dtype), runs=MAX_POOL)
    agree(lambda x: F.max_pooling_2d(x, 2, 2), np.zeros((1, 2, 4, 4)), runs=MAX_POOL)  # ties
    for x, options in [
        (draw(2, 3, 8, 8, dtype='e'), (2,)),
        (draw(2, 3, 8, 8), (3, 2, 2, False)),  # more padding than PyTorch allows
    ]:
        agree(lambda x, options=options: F.max_pooling_2d(x, *options), x, second=False)
    padding = F.max_pooling_2d(draw(1, 1, 4, 4), 2, 3, 1, cover_all=True)  # PyTorch omits it
    assert padding.shape == (1, 1, 3, 3) and np.isneginf(padding.array[0, 0, 2]).all()
    agree(lambda x: F.max_pooling_1d(x, 2), draw(2, 3, 8))
    agree(lambda x: F.max_pooling_3d(x, 2), draw(2, 3, 4, 4, 4))


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


def test_average_pooling_2d(agree):
    for dtype in 'fd':
        for options in (2,), (3, 2, 1), ((2, 3), (1, 2), (1, 0)):
            agree(lambda x, options=options: F.average_pooling_2d(x, *options),
                  draw(2, 3, 7, 8, dtype=dtype), runs=AVERAGE_POOL)
    agree(lambda x: F.average_pooling_2d(x, 2, 2, 2), draw(2, 3, 7, 8))
    agree(lambda x: F.average_pooling_2d(x, 2), draw(0, 3, 8, 8))
    agree(lambda x: F.average_pooling_2d(x, 2), draw(2, 3, 8, 8, dtype='e'), second=False)


def test_relu(agree):
    for x in draw(3, 4), draw(3, 4, dtype='f'), draw(0, 4), np.array(2.), np.zeros((2, 2)):
        agree(F.relu, x, runs=['relu', 'leaky_relu_backward'])
    agree(F.relu, draw(3, 4, dtype='e'), second=False)


def test_leaky_relu(agree):
    for slope in .2, 0, -.5, np.float32(.3):
        for x in draw(3, 4), draw(3, 4, dtype='f'), draw(0, 4), np.array(-2.), np.zeros((2, 2)):
            agree(lambda x, slope=slope: F.leaky_relu(x, slope), x,
                  runs=['leaky_relu', 'leaky_relu_backward'])
    agree(F.leaky_relu, draw(3, 4, dtype='e'), second=False)


def test_log_softmax(agree):
    for x in draw(3, 4), draw(3, 4, dtype='f'), draw(2, 3, 4), draw(0, 4), 1000 * draw(3, 4):
        agree(F.log_softmax, x, runs=['_log_softmax'], second=len(x) > 0 and abs(x).max() < 100)
    agree(lambda x: F.log_softmax(x, axis=-1), draw(2, 3, 4), runs=['_log_softmax'])
    agree(F.log_softmax, draw(3, 4, dtype='e'), second=False)


def test_softmax_cross_entropy(agree):
    t = np.array([1, 0, -1, 3], 'i')
    for options in {}, {'reduce': 'no'}, {'class_weight': np.arange(1., 5)}, {'normalize': False}:
        agree(lambda x, options=options: F.softmax_cross_entropy(x, t, **options), draw(4, 4),
              runs=['_log_softmax'], second=False)
    agree(lambda x: F.softmax_cross_entropy(x, t, enable_double_backprop=True), draw(4, 4),
          runs=['_log_softmax'])
    agree(lambda x: F.softmax_cross_entropy(x, t), draw(4, 4, dtype='e'), second=False)


def test_embed_id(agree):
    for ids, ignored in [
        (np.array([[0, 1, 1], [2, 0, -1]], 'i'), -1), (np.array([0, 4, 4], 'i8'), 4),
        (np.array([3, 3, 3], 'i'), None),
    ]:
        for dtype in 'fd':
            agree(lambda W, ids=ids, ignored=ignored: F.embed_id(ids, W, ignored),
                  draw(5, 3, dtype=dtype), runs=['embedding_dense_backward'],
                  second=False)
    agree(lambda W: F.embed_id(np.array([-1, 0], 'i'), W), draw(5, 3))  # the last row
    agree(lambda W: F.embed_id(np.array([1, 0], 'i'), W), draw(5, 3, dtype='e'), second=False)
    agree(lambda W: F.embed_id(np.array([1, 0, 1], 'i'), W), draw(5, 3),
          runs=['embedding_dense_backward'])


def test_memory_of_inputs(agree):
    W, statistics = draw(2, 3, 3, 3), draw(3)
    functions = {
        F.relu: (), F.convolution_2d: (W,), F.deconvolution_2d: (draw(3, 2, 3, 3),),
        F.batch_normalization: (statistics, statistics),
    }
    for x in unusual(draw(4, 3, 5, 6)):
        for f, others in functions.items():
            agree(f, x, *others, runs=_operators(f), second=False)
        agree(lambda x: F.max_pooling_2d(x, 2), x, runs=MAX_POOL)
        agree(lambda x: F.average_pooling_2d(x, 2), x, runs=AVERAGE_POOL)
    with chainer.no_backprop_mode():
        swapped = F.convolution_2d(x.astype(x.dtype.newbyteorder()), W)  # not in PyTorch
        np.testing.assert_allclose(swapped.array, F.convolution_2d(x, W).array, atol=1e-12)


def _operators(f):
    return {F.relu: {'relu'}, F.batch_normalization: BATCH_NORM}.get(f, {'convolution_backward'})
