"""Every Chainer function has an expression with the same outputs and gradients, or a reason.

The calls are those of ``calls_of_functions``, mostly in float64, where rounding hides nothing.
"""

import importlib
import inspect
import pathlib
import pkgutil
import runpy
import warnings

import chainer
import chainer.functions as F
import numpy as np
import pytest
import torch
from calls_of_functions import CASES, FLOAT32
from chainer import Function, FunctionNode

import chainer_compat
from chainer_compat.pytorch.expressions import EXPRESSIONS, NOT_EXPRESSIBLE, RECORDED

pytestmark = pytest.mark.mpi_skip

DOCS = pathlib.Path(__file__).parents[4] / 'docs'

WITHOUT = '''
    negative_sampling
'''

ROIS = np.array([[0, 1, 4, 3], [2, 0, 9, 4], [-3, -1, 0, 1]], 'f'), np.array([1, 0, 1], 'i')

OPTIONS = {
    'average_pooling_nd': lambda v: F.average_pooling_nd(v(2, 3, 5, 5), 3, 2, 1, pad_value=None),
    'average_pooling_2d pad': lambda v: F.average_pooling_2d(v(2, 3, 5, 5), 2, 2, 2),
    'batch_normalization axis': lambda v: F.batch_normalization(
        v(4, 3, 2), v(2), v(2), axis=(0, 1)),
    'batch_normalization shape': lambda v: F.batch_normalization(v(4, 3, 2), v(3, 2), v(3, 2)),
    'convolution cover_all': lambda v: F.convolution_2d(
        v(2, 3, 6, 7), v(4, 3, 3, 3), v(4), 2, 1, cover_all=True),
    'convolution groups': lambda v: F.convolution_2d(
        v(2, 4, 6, 5), v(6, 2, 3, 2), v(6), (2, 1), (1, 0), groups=2, dilate=(1, 2)),
    'deconvolution outsize': lambda v: F.deconvolution_2d(
        v(2, 3, 4, 4), v(3, 2, 3, 3), v(2), 2, 1, outsize=(8, 7)),
    'deconvolution small': lambda v: F.deconvolution_2d(
        v(2, 3, 4, 4), v(3, 2, 3, 3), v(2), 2, 0, outsize=(8, 8)),
    'embed_id ignore': lambda v: F.embed_id(np.array([[0, -1], [2, 0]], 'i'), v(3, 4), -1),
    'get_item steps': lambda v: F.get_item(v(4, 5), (slice(None, None, -2), slice(4, 0, -3))),
    'get_item arrays': lambda v: F.get_item(
        v(4, 5, 2), (np.array([0, 2, 2]), Ellipsis, None, 1)),
    'get_item arrays beside integers': lambda v: F.get_item(
        v(3, 3, 3), (0, slice(None), np.array([0, 2, 1], 'B'))),
    'huber no': lambda v: F.huber_loss(v(2, 3), v(2, 3), .1, reduce='no'),
    'linear': lambda v: F.linear(v(2, 3, 4), v(5, 4), v(5), n_batch_axes=2),
    'max ties': lambda v: F.max(F.relu(v(3, 4) - 2.), axis=1),
    'max_pooling cover_all': lambda v: F.max_pooling_2d(v(2, 3, 7, 8), 3, 2, 0),
    'max_pooling pad': lambda v: F.max_pooling_2d(v(2, 3, 7, 8), 3, 2, 1, cover_all=False),
    'max_pooling end': lambda v: F.max_pooling_2d(v(1, 1, 5, 5), 2, 3, 1),
    'maximum ties': lambda v: F.maximum(x := v(2, 3), x * 1.),
    'min ties': lambda v: F.min(F.relu(v(3, 4) - 2.)),
    'normalize zeros': lambda v: F.normalize(v(2, 3) * np.array([[0], [1]], v.dtype)),
    'pad reflect': lambda v: F.pad(v(2, 3, 4), ((0, 0), (0, 0), (1, 2)), 'reflect'),
    'permutate inv': lambda v: F.permutate(v(3, 2), np.array([2, 0, 1], 'i'), inv=True),
    'negative_sampling': lambda v: F.negative_sampling(
        v(3, 4), np.array([0, 2, -1], 'i'), v(3, 4),
        chainer.utils.WalkerAlias([1, 2, 5]).sample, 6, reduce='no'),
    'reshape': lambda v: F.reshape(v(2, 3, 4), (4, -1)),
    'resize nearest': lambda v: F.resize_images(v(1, 2, 5, 4), (7, 9), mode='nearest'),
    'resize corners': lambda v: F.resize_images(v(1, 2, 5, 4), (3, 9), align_corners=False),
    'roi_average_align_2d': lambda v: F.roi_average_align_2d(
        v(2, 3, 6, 5), *ROIS, (3, 2), .7, sampling_ratio=(2, 3)),
    'roi_max_pooling_2d': lambda v: F.roi_max_pooling_2d(v(2, 3, 6, 5), *ROIS, (4, 3), 1.1),
    'softmax_cross_entropy weight': lambda v: F.softmax_cross_entropy(
        v(4, 3), np.array([0, 1, -1, 2], 'i'), class_weight=np.array([1, 2, 3], v.dtype)),
    'softmax_cross_entropy pixels': lambda v: F.softmax_cross_entropy(
        v(2, 3, 2, 2), np.array([[[0, 1], [-1, 2]]] * 2, 'i'), normalize=False),
    'softmax_cross_entropy soft': lambda v: F.softmax_cross_entropy(v(2, 3), v(2, 3)),
    'sigmoid_cross_entropy': lambda v: F.sigmoid_cross_entropy(
        v(2, 3), np.array([[0, 1, -1], [1, 0, 1]], 'i'), reduce='no'),
    'split': lambda v: F.split_axis(v(2, 6), [1, 1, 4], 1),
    'swapaxes': lambda v: F.swapaxes(v(2, 3, 4), -1, 0),
    'unpooling': lambda v: F.unpooling_2d(v(2, 3, 3, 3), 3, 2, 1, cover_all=False),
}


class Case(chainer.Chain):
    """Calls a function with parameters, so that all gradients are compared."""

    def __init__(self, run, dtype):
        super().__init__()
        self.run, self.dtype = run, dtype
        self.random = np.random.RandomState(0)
        self.count = 0

    def __call__(self, *shape):
        name = f'x{self.count}'
        self.count += 1
        if name not in self.__dict__:
            with self.init_scope():
                setattr(self, name, chainer.Parameter(
                    self.random.uniform(.1, .9, shape).astype(self.dtype)))
        return getattr(self, name)

    def many(self, n, *shape):
        return [self(*shape) for _ in range(n)]

    def forward(self):
        self.count = 0
        return self.run(self)


def convert(run, dtype='d'):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of Chainer about small batches
        case = Case(run, dtype)
        case.forward()
        module = chainer_compat.to_torch(case, train=True, call=case.forward)
        found = chainer_compat.compare(case, module, call=case.forward)
    assert found.first_difference is None, found
    return case, module, found


@pytest.mark.parametrize('name', sorted(CASES.keys() - set(WITHOUT.split())))
def test_functions(name):
    dtype = 'f' if name in FLOAT32.split() else 'd'
    *_, found = convert(lambda v: CASES[name](getattr(F, name), v), dtype)
    limit = 2e-5 if dtype == 'f' else 1e-8
    assert max([*found.functions.values(), *found.gradients.values(), 0]) < limit


@pytest.mark.parametrize('name', sorted(OPTIONS))
def test_options(name):
    dtype = 'f' if name.startswith(('resize', 'roi')) else 'd'  # of Chainer
    *_, found = convert(OPTIONS[name], dtype)
    limit = 2e-5 if dtype == 'f' else 1e-9
    assert max([*found.functions.values(), *found.gradients.values(), 0]) < limit


@pytest.mark.parametrize('name', WITHOUT.split())
def test_functions_without_expression(name):
    case = Case(lambda v: CASES[name](getattr(F, name), v), 'f')
    case.forward()
    with pytest.raises(chainer_compat.ConversionError, match=r'functions.py:\d+\)(:| can| has)'):
        chainer_compat.to_torch(case, call=case.forward)


def test_a_wrong_expression_is_noticed(monkeypatch):
    monkeypatch.setitem(EXPRESSIONS, 'activation.tanh.Tanh', lambda f, x: torch.tanh(x) * 1.0001)
    with pytest.raises(chainer_compat.ConversionError, match=r'First difference: Tanh \('):
        convert(lambda v: F.sigmoid(F.tanh(v(2, 3))), 'f')


def test_a_wrong_gradient_is_noticed(monkeypatch):
    wrong = lambda f, x: torch.tanh(x).detach() + x * 0  # noqa: E731
    monkeypatch.setitem(EXPRESSIONS, 'activation.tanh.Tanh', wrong)
    with pytest.raises(chainer_compat.ConversionError, match=r'Tanh .*, gradient of input 0 by'):
        convert(lambda v: F.sigmoid(F.tanh(v(2, 3))), 'f')


def test_every_function_has_an_entry_or_a_reason():
    """Classes of gradients belong to the functions that they are the gradients of."""
    found = set()
    for module in pkgutil.walk_packages(F.__path__, 'chainer.functions.'):
        imported = importlib.import_module(module.name)
        for name, cls in inspect.getmembers(imported, inspect.isclass):
            if issubclass(cls, FunctionNode | Function) and cls.__module__ == module.name:
                found.add(f'{module.name}.{name}'.removeprefix('chainer.functions.'))
    gradients = {name for name in found if 'Grad' in name.rpartition('.')[2]}
    internal = {
        'array.select_item.Assign', 'math.cumprod.Cumprodsum',
        'normalization.group_normalization._MulInvStd', 'normalization.group_normalization._XHat',
        'normalization.l2_normalization._SetItemZero', 'math.einsum.DiagEinSum',
        'pooling.max_pooling_nd.MaxPoolingNDWithIndexes', 'pooling.pooling_2d.Pooling2D',
        'pooling.pooling_nd._PoolingND', 'math.minmax.IndexSelectorBase',
        'math.minmax.SelectorBase', 'rnn.n_step_rnn.BaseNStepRNN',
        'rnn.n_step_rnn.CudnnRNNWeightConcat', 'util.forget.Forget'}
    cudnn = {name for name in found if name.startswith('rnn.n_step_')}
    known = EXPRESSIONS.keys() | NOT_EXPRESSIBLE.keys()
    assert sorted(found - gradients - internal - cudnn - known) == []
    assert RECORDED.keys() <= EXPRESSIONS.keys()
    chainers = {name for name in known if not name.startswith('chainer.')}
    assert sorted(chainers - found) == []


def test_the_page_lists_the_expressions():
    generator = runpy.run_path(str(DOCS / 'expressions.py'))
    assert generator['page']() == generator['PAGE'].read_text('utf-8'), (
        'run python docs/expressions.py')
