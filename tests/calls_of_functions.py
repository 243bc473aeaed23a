"""A call of every Chainer function."""

import chainer
import chainer.functions as F
import numpy as np

f32 = np.float32
INT = np.array([1, 0, 2], 'i')
PREDICTED = np.eye(3, dtype='f')[INT]
COND = np.array([[True, False, True], [False, True, True]])
ROIS = np.array([[0, 0, 4, 4], [1, 1, 5, 5]], 'f')
ROI_INDICES = np.array([0, 1], 'i')
COO = chainer.utils.to_coo(np.array([[0, 1, 0], [2, 0, 3]], 'f'))


class Draw:
    """Draws inputs: ``v(2, 3)`` is a Variable with numbers from .1 to .9, valid for every function.

    With ``step``, each input is shifted by ``step`` times its own random direction.
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
    # Chainer's gradients of the mean and the projection are wrong; they are not used for training.
    'fixed_decorrelated_batch_normalization': lambda f, v: f(
        v(4, 4), np.full((1, 4), .3, v.dtype), np.ones((1, 4, 4), v.dtype), groups=1),
    'group_normalization': lambda f, v: f(v(2, 4, 3), 2, v(4), v(4)),
    'layer_normalization': normalization(),
}

# Functions that Chainer itself reports as deprecated.
DEPRECATED = {'batch_matmul', 'fixed_batch_renormalization'}

# Chainer has no second derivative of these functions, or differentiates integers.
ONCE = '''
    local_convolution_2d argmax_crf1d black_out connectionist_temporal_classification crf1d
    spatial_pyramid_pooling_2d local_response_normalization negative_sampling
    roi_average_align_2d roi_average_pooling_2d roi_max_align_2d roi_max_pooling_2d
    roi_pooling_2d simplified_dropconnect spatial_transformer_sampler spatial_transformer_grid
    forget batch_renormalization as_strided deformable_convolution_2d_sampler
    decorrelated_batch_normalization fixed_decorrelated_batch_normalization tree_lstm
    n_step_lstm n_step_bilstm n_step_gru n_step_bigru n_step_rnn n_step_birnn gumbel_softmax
'''


# Chainer rejects float64.
FLOAT32 = '''
    bilinear resize_images roi_average_align_2d roi_average_pooling_2d roi_max_align_2d
    roi_max_pooling_2d roi_pooling_2d
'''
NOT_FLOAT16 = ['cholesky', 'decorrelated_batch_normalization']  # NumPy's linalg rejects it

# Float options that are not written as floats in the cases or signatures above.
OPTIONS = {
    'batch_normalization': {'eps': 2e-5, 'decay': .9},
    'contrastive': {'margin': 1.},
    'decorrelated_batch_normalization': {'eps': 2e-5, 'decay': .9},
    'local_response_normalization': {'k': 2.},
}

# These functions of NumPy and SciPy take the same arguments.
