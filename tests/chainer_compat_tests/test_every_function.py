"""Every function of Chainer runs without a warning, and its first two derivatives are right.

Warnings are errors in these tests.  Derivatives are compared with finite differences, and results
with NumPy where it has the same function; test_references.py has more tests of the patched ones.
"""

import inspect
import itertools
import warnings

import chainer
import chainer.functions as F
import numpy as np
import pytest
import scipy.special
from chainer.utils import type_check

pytestmark = pytest.mark.mpi_skip

f32 = np.float32
INT = np.array([1, 0, 2], 'i')
PREDICTED = np.eye(3, dtype='f')[INT]
COND = np.array([[True, False, True], [False, True, True]])
ROIS = np.array([[0, 0, 4, 4], [1, 1, 5, 5]], 'f')
ROI_INDICES = np.array([0, 1], 'i')
COO = chainer.utils.to_coo(np.array([[0, 1, 0], [2, 0, 3]], 'f'))


class Draw:
    """``v(2, 3)`` is a Variable of that shape; its numbers, .1 to .9, suit every function.

    They are ``step`` away from where they would be, in the direction that goes with each input.
    """

    def __init__(self, dtype='f', step=0):
        self.random = np.random.RandomState(0)
        self.dtype = dtype
        self.step = step
        self.inputs = []
        self.directions = []

    def __call__(self, *shape):
        x = self.random.uniform(.1, .9, shape)
        self.directions.append(self.random.uniform(-1, 1, shape))
        x += self.step * self.directions[-1]
        self.inputs.append(chainer.Variable(x.astype(self.dtype)))
        return self.inputs[-1]

    def many(self, n, *shape):
        return [self(*shape) for _ in range(n)]


def on(*shape):
    """Return a case for a function of one array."""
    return lambda f, v: f(v(*shape))


def two(*shape):
    return lambda f, v: f(v(*shape), v(*shape))


def to(*args, **kwargs):
    """Return a case for a function of one 2-d array and these arguments."""
    return lambda f, v: f(v(2, 3), *args, **kwargs)


def image(*args, **kwargs):
    return lambda f, v: f(v(2, 4, 6, 6), *args, **kwargs)


def rnn(gates, layers=1, directions=1, cell=False):
    """Return a case for one of the n_step functions: three sequences of 3, 2, 2."""
    def case(f, v):
        n = layers * directions
        h = [v(n, 3, 4) for _ in range(1 + cell)]
        ws = [[v(4, 5 if i < gates // 2 else 4) for i in range(gates)] for _ in range(n)]
        bs = [v.many(gates, 4) for _ in range(n)]
        *ends, ys = f(layers, .5, *h, ws, bs, [v(3, 5), v(2, 5), v(2, 5)])
        return [*ends, *ys]
    return case


def pooled(n):
    """Return a case for a pooling or unpooling function of n dimensions."""
    return lambda f, v: f(v(2, 3, *[4] * n), 2)


def convolution(n, transposed=False):
    return lambda f, v: f(v(2, 3, *[5] * n), v(*((3, 4) if transposed else (4, 3)), *[3] * n), v(4))


def normalization(*given):
    return lambda f, v: f(v(4, 3), v(3), v(3), *(v(3) for _ in given))


def square_matrices(f, v):
    return f(v(2, 3, 3) + 2 * np.eye(3, dtype=f32))


OF_ONE_ARRAY = '''
    absolute arccos arcsin arctan arctanh ceil clipped_relu cos cosh cumprod cumsum digamma
    dropout elu erf erfc erfcinv erfcx erfinv exp expm1 fix flatten fliplr flipud floor
    hard_sigmoid identity leaky_relu lgamma log log10 log1p log2 log_ndtr log_softmax logsumexp
    max mean min ndtr ndtri normalize prod relu relu6 rrelu rsqrt selu sigmoid sign sin sinh
    softmax softplus sqrt square squeeze sum tan tanh transpose crelu batch_l2_norm_squared
    argmax argmin gumbel_softmax diagonal
'''
OF_TWO_ARRAYS = '''
    absolute_error add arctan2 cross_covariance gaussian maximum mean_absolute_error
    mean_squared_error minimum squared_difference squared_error gaussian_kl_divergence
'''

CASES = {
    **dict.fromkeys(OF_ONE_ARRAY.split(), on(2, 3)),
    **dict.fromkeys(OF_TWO_ARRAYS.split(), two(2, 3)),
    'huber_loss': lambda f, v: f(v(2, 3), v(2, 3), 1.),
    'matmul': lambda f, v: f(v(2, 3), v(3, 2)),
    'fmod': lambda f, v: f(v(2, 3), np.full((2, 3), .3, v.dtype)),
    'average': lambda f, v: f(v(2, 3), axis=1, weights=v(3)),
    'accuracy': lambda f, v: f(v(3, 3).array, INT),
    'copy': to(-1),
    'flip': to(0),
    'as_strided': to((2, 2), (1, 2)),
    **dict.fromkeys(['batch_det', 'batch_inv'], square_matrices),
    'det': lambda f, v: f(v(3, 3)),
    'inv': lambda f, v: f(v(3, 3) + 2 * np.eye(3, dtype=f32)),
    'cholesky': lambda f, v: f(F.matmul(x := v(3, 3), x, transb=True) + np.eye(3, dtype=f32)),
    'bernoulli_nll': lambda f, v: f(v(2, 3), v(2, 3)),
    'gaussian_nll': lambda f, v: f(v(2, 3), v(2, 3), v(2, 3)),
    'bias': lambda f, v: f(v(2, 3), v(3)),
    'scale': lambda f, v: f(v(2, 3), v(3)),
    'bilinear': lambda f, v: f(v(2, 3), v(2, 4), v(3, 4, 5)),
    'binary_accuracy': lambda f, v: f(v(4).array, np.array([1, 0, 1, -1], 'i')),
    'black_out': lambda f, v: f(v(2, 3), np.array([0, 1], 'i'), v(5, 3), np.ones((2, 2), 'i')),
    'broadcast': lambda f, v: f(v(2, 3), v(3)),
    'broadcast_to': to((4, 2, 3)),
    'sum_to': to((1, 3)),
    'cast': to('d'),
    'classification_summary': lambda f, v: f(PREDICTED, INT),
    **dict.fromkeys(['f1_score', 'precision', 'recall'], lambda f, v: f(PREDICTED, INT)),
    'clip': to(.3, .6),
    **dict.fromkeys(['concat', 'dstack', 'hstack', 'stack', 'vstack'],
                    lambda f, v: f(v.many(3, 2, 3))),
    'connectionist_temporal_classification':
        lambda f, v: f(v.many(5, 3, 4), np.array([[1, 2], [2, 1], [3, 3]], 'i'), 0),
    'contrastive': lambda f, v: f(v(3, 4), v(3, 4), np.array([0, 1, 0], 'i')),
    'decov': on(4, 3),
    'discriminative_margin_based_clustering_loss': lambda f, v: f(
        v(1, 3, 4, 4), (np.arange(16) % 3).reshape(1, 4, 4).astype('i'), .5, 1.5, 3),
    'hinge': lambda f, v: f(v(3, 3), INT),
    'negative_sampling': lambda f, v: f(
        v(2, 3), np.array([0, 1], 'i'), v(5, 3), lambda shape: np.ones(shape, 'i'), 2),
    'r2_score': lambda f, v: f(v(4).array, v(4).array),
    'sigmoid_cross_entropy': to(COND.astype('i')),
    'softmax_cross_entropy': lambda f, v: f(v(3, 4), INT, enable_double_backprop=True),
    'triplet': lambda f, v: f(v(3, 4), v(3, 4), v(3, 4)),
    'crf1d': lambda f, v: f(v(3, 3), v.many(2, 2, 3), [INT[:2], INT[1:]]),
    'argmax_crf1d': lambda f, v: f(v(3, 3), v.many(2, 2, 3))[0],
    **{f'convolution_{n}d': convolution(n) for n in (1, 2, 3)}, 'convolution_nd': convolution(2),
    **{f'deconvolution_{n}d': convolution(n, True) for n in (1, 2, 3)},
    'deconvolution_nd': convolution(2, True),
    **{f'{kind}_pooling_{n}d': pooled(n) for kind in ('average', 'max') for n in (1, 2, 3)},
    **{f'{kind}_pooling_nd': pooled(2) for kind in ('average', 'max')},
    **{f'unpooling_{n}d': pooled(n) for n in (1, 2, 3)}, 'unpooling_nd': pooled(2),
    'upsampling_2d': lambda f, v: f(
        v(2, 3, 2, 2), F.max_pooling_2d(v(2, 3, 4, 4), 2, return_indices=True)[1], 2),
    'deformable_convolution_2d_sampler': lambda f, v: f(
        v(1, 2, 4, 4), v(1, 18, 2, 2), v(3, 2, 3, 3), v(3)),
    'depthwise_convolution_2d': lambda f, v: f(v(1, 2, 4, 4), v(3, 2, 3, 3), v(6)),
    'dilated_convolution_2d': lambda f, v: f(v(1, 2, 7, 7), v(3, 2, 3, 3), v(3), dilate=2),
    'local_convolution_2d': lambda f, v: f(v(1, 2, 4, 4), v(3, 2, 2, 2, 3, 3), v(3, 2, 2)),
    'im2col': image(3),
    'shift': on(2, 9, 4, 4),
    'spatial_pyramid_pooling_2d': image(2, 'max'),
    'spatial_transformer_grid': lambda f, v: f(v(2, 2, 3), (4, 4)),
    'spatial_transformer_sampler': lambda f, v: f(v(2, 3, 4, 4), v(2, 2, 3, 3)),
    'roi_pooling_2d': lambda f, v: f(
        v(2, 3, 6, 6), np.column_stack([ROI_INDICES.astype('f'), ROIS]), 2, 2, 1.),
    **{f'roi_{kind}_pooling_2d': image(ROIS, ROI_INDICES, 2, 1.) for kind in ('average', 'max')},
    **{f'roi_{kind}_align_2d': image(ROIS, ROI_INDICES, 2, 1.) for kind in ('average', 'max')},
    'resize_images': image((3, 9)),
    'local_response_normalization': on(2, 6, 3, 3),
    'depth2space': image(2),
    'space2depth': image(2),
    'embed_id': lambda f, v: f(INT, v(4, 3)),
    'linear': lambda f, v: f(v(2, 3), v(4, 3), v(4)),
    'einsum': lambda f, v: f('ij,jk->ik', v(2, 3), v(3, 2)),
    'tensordot': lambda f, v: f(v(2, 3), v(3, 2), axes=1),
    'expand_dims': to(0),
    'fft': lambda f, v: f((v(2, 3), v(2, 3))),
    'ifft': lambda f, v: f((v(2, 3), v(2, 3))),
    'forget': lambda f, v: f(F.sin, v(2, 3)),
    'get_item': to((slice(None), [0, 2])),
    'linear_interpolate': lambda f, v: f(v(2, 3), v(2, 3), v(2, 3)),
    'lstm': lambda f, v: f(v(2, 3), v(2, 12)),
    'slstm': lambda f, v: f(v(2, 3), v(2, 3), v(2, 12), v(2, 12)),
    'tree_lstm': lambda f, v: f(v(2, 3), v(2, 3), v(2, 15)),
    'n_step_lstm': rnn(8, 1, cell=True), 'n_step_bilstm': rnn(8, 1, 2, cell=True),
    'n_step_gru': rnn(6), 'n_step_bigru': rnn(6, 1, 2),
    'n_step_rnn': rnn(2), 'n_step_birnn': rnn(2, 1, 2),
    'maxout': lambda f, v: f(v(2, 6), 2),
    'prelu': lambda f, v: f(v(2, 3), v(3)),
    'swish': lambda f, v: f(v(2, 3), v(3)),
    'moveaxis': to(0, 1),
    'rollaxis': to(1),
    'swapaxes': to(0, 1),
    'reshape': to((3, 2)),
    'tile': to((2, 1)),
    'repeat': to(2, axis=1),
    'pad': to(1, 'constant', constant_values=-1),
    'pad_sequence': lambda f, v: f([v(3), v(2)], padding=-1),
    'permutate': lambda f, v: f(v(3, 2), INT),
    'polygamma': lambda f, v: f(np.array(1, 'i'), v(3)),
    'zeta': lambda f, v: f(np.array([2, 3, 4], 'f'), v(3) + 1),
    'scatter_add': lambda f, v: f(v(3, 2), [0, 2, 0], v(3, 2)),
    'select_item': lambda f, v: f(v(3, 3), INT),
    'separate': to(1),
    'simplified_dropconnect': lambda f, v: f(v(2, 3), v(4, 3), v(4)),
    'sparse_matmul': lambda f, v: f(COO, v(3, 2)),
    'split_axis': lambda f, v: f(v(4, 3), 2, 0),
    'transpose_sequence': lambda f, v: f([v(3), v(2), v(1)]),
    'where': lambda f, v: f(COND, v(2, 3), v(2, 3)),
    'zoneout': two(2, 3),
    'batch_normalization': normalization(),
    'batch_renormalization': lambda f, v: f(
        v(4, 3), v(3), v(3), 1., 0., running_mean=np.zeros(3, v.dtype),
        running_var=np.ones(3, v.dtype)),
    'fixed_batch_normalization': normalization('mean', 'var'),
    'decorrelated_batch_normalization': lambda f, v: f(v(8, 4), groups=2),
    # Chainer's gradients of the mean and the projection are wrong; nobody trains those.
    'fixed_decorrelated_batch_normalization': lambda f, v: f(
        v(4, 4), np.full((1, 4), .3, v.dtype), np.ones((1, 4, 4), v.dtype), groups=1),
    'group_normalization': lambda f, v: f(v(2, 4, 3), 2, v(4), v(4)),
    'layer_normalization': normalization(),
}

# Chainer says so itself, of whatever version.
DEPRECATED = {'batch_matmul', 'fixed_batch_renormalization'}

# Chainer has no second derivative of these, or derives through integers.
ONCE = '''
    local_convolution_2d argmax_crf1d black_out connectionist_temporal_classification crf1d
    spatial_pyramid_pooling_2d local_response_normalization negative_sampling
    roi_average_align_2d roi_average_pooling_2d roi_max_align_2d roi_max_pooling_2d
    roi_pooling_2d simplified_dropconnect spatial_transformer_sampler spatial_transformer_grid
    forget batch_renormalization as_strided deformable_convolution_2d_sampler
    decorrelated_batch_normalization fixed_decorrelated_batch_normalization tree_lstm
    n_step_lstm n_step_bilstm n_step_gru n_step_bigru n_step_rnn n_step_birnn gumbel_softmax
'''


# Chainer refuses float64.
FLOAT32 = '''
    bilinear resize_images roi_average_align_2d roi_average_pooling_2d roi_max_align_2d
    roi_max_pooling_2d roi_pooling_2d
'''
NOT_FLOAT16 = ['cholesky', 'decorrelated_batch_normalization']  # NumPy's linalg rejects it

# Options that are not floats in the cases or signatures above.
OPTIONS = {
    'batch_normalization': {'eps': 2e-5, 'decay': .9},
    'contrastive': {'margin': 1.},
    'decorrelated_batch_normalization': {'eps': 2e-5, 'decay': .9},
    'local_response_normalization': {'k': 2.},
}

# These of NumPy's and SciPy's functions take the same arguments.
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


def run(name, v, twice):
    """Return [(a sum over the outputs, its gradients), (a sum over those, its gradients)]."""
    np.random.seed(0)  # for dropout and others that draw numbers of their own
    ys = CASES[name](getattr(F, name), v)
    ys = [y for y in (ys if isinstance(ys, list | tuple) else [ys])
          if isinstance(y, chainer.Variable) and y.dtype.kind == 'f' and y.requires_grad]
    if not ys or ys[0].creator is None:
        return []
    sums = [sum(F.sum(y * y) for y in ys)]
    gradients = []
    for _ in range(1 + twice):
        for x in v.inputs:
            x.cleargrad()
        sums[-1].backward(enable_double_backprop=twice)
        gs = [x.grad_var for x in v.inputs]
        assert any(g is not None for g in gs)
        gradients.append([None if g is None else g.array for g in gs])
        if not any(g is not None and g.creator is not None for g in gs):
            break
        sums.append(sum(F.sum(g * g) for g in gs if g is not None))
    return [(float(s.array), g) for s, g in zip(sums, gradients, strict=False)]


@pytest.mark.parametrize('name', sorted(CASES))
def test_runs_in_silence(name):
    run(name, Draw(), name not in ONCE.split())


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
    'fewer channels': lambda x: x[:, :-1] if x.ndim > 1 else x,
    'one axis less': lambda x: x[0] if x.ndim else x,
    'one axis more': lambda x: x[None],
    'one number': lambda x: np.array(1, x.dtype),
    'of other precision': lambda x: x.astype('d'),
}


def test_errors_of_wrong_inputs():
    """The check of types fails with its own error, which shows shapes and dtypes."""
    for name, case in CASES.items():
        v = Draw()
        case(getattr(F, name), v)
        for index, change in itertools.product(range(min(len(v.inputs), 6)), WRONG.values()):
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')
                try:
                    case(getattr(F, name), Wrong(index, change))
                except Exception as error:
                    assert 'An Expr instance cannot be evaluated' not in str(error), name
    for labels in np.zeros(2, 'i'), np.zeros(4, 'i'), np.zeros((3, 2), 'i'):
        with pytest.raises(type_check.InvalidType, match='Expect'):
            F.softmax_cross_entropy(np.ones((3, 4), 'f'), labels)


@pytest.mark.parametrize('name', sorted(CASES))
def test_derivatives(name):
    dtype, eps, tolerance = ('f', 1e-3, 2e-2) if name in FLOAT32.split() else ('d', 1e-5, 1e-5)
    twice = name not in ONCE.split()
    middle, low, high = (Draw(dtype, step) for step in (0, -eps, eps))
    found = [run(name, v, twice) for v in (middle, low, high)]
    for (_, gradients), (below, _), (above, _) in zip(*found, strict=True):
        slope = sum((g * d).sum() for g, d in zip(gradients, middle.directions, strict=True)
                    if g is not None)
        np.testing.assert_allclose(slope, (above - below) / (2 * eps), tolerance, tolerance / 100)


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


@pytest.mark.parametrize('name', sorted(NAMESAKES))
def test_same_as_in_numpy(name):
    def namesake(*args, **options):
        return NAMESAKES[name](*map(arrays, args), **{k: arrays(x) for k, x in options.items()})

    y = CASES[name](getattr(F, name), Draw('d'))
    expected = CASES[name](namesake, Draw('d'))
    np.testing.assert_allclose(arrays(y), expected, 1e-6, 1e-8)
