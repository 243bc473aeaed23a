"""Calls with arguments of Chainer 1 give the same bits as their modern forms, and one warning."""

import contextlib
import inspect
import itertools
import pickle
import warnings

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.links.model.vision import googlenet, resnet, vgg

from chainer_compat.dialect import old_arguments

pytestmark = pytest.mark.mpi_skip

#: The modern way of each argument of the table.
MODERN = {
    'train': {True: {'train': True}, False: {'train': False}},
    'test': {True: {'train': False}, False: {'train': True}},
    'use_cudnn': {True: {'use_cudnn': 'always'}, False: {'use_cudnn': 'never'}},
    'volatile': {'on': {'enable_backprop': False}, True: {'enable_backprop': False},
                 'off': {}, 'auto': {}, False: {}},
    'finetune': {False: {}},
}


def variable(*shape):
    return chainer.Variable(np.random.standard_normal(shape).astype('f'))


def rnn_arguments(n_weights, n_states, directions=1):
    """Return the arguments of a recurrent function with two layers."""
    sizes = [3] * directions + [4 * directions] * directions
    return [2, .5, *[variable(2 * directions, 2, 4) for _ in range(n_states)],
            [[variable(4, size if i < n_weights // 2 else 4) for i in range(n_weights)]
             for size in sizes],
            [[variable(4) for _ in range(n_weights)] for _ in sizes],
            [variable(2, 3), variable(1, 3)]]


def vision(cls, method):
    class Small(cls):
        def __init__(self):
            chainer.Chain.__init__(self)
            with self.init_scope():
                self.bn = L.BatchNormalization(3)

        @property
        def functions(self):
            return {'a': [self.bn, F.dropout]}

    arguments = {'forward': [variable(2, 3, 4, 4), ['a']],
                 'extract': [[np.full((8, 8, 3), i, 'uint8') for i in (1, 9)], ['a'], (6, 6)]}
    return getattr(Small(), method), arguments[method]


#: A callable of each function of the table, with all arguments that Chainer 7 requires.
CASES = {
    'rrelu': lambda: (F.rrelu, [variable(3, 4)]),
    'spatial_transformer_grid':
        lambda: (F.spatial_transformer_grid, [variable(2, 2, 3), (3, 4)]),
    'spatial_transformer_sampler':
        lambda: (F.spatial_transformer_sampler, [variable(2, 3, 4, 4), variable(2, 2, 3, 3)]),
    'dropout': lambda: (F.dropout, [variable(3, 4), .3]),
    'zoneout': lambda: (F.zoneout, [variable(3, 4), variable(3, 4), .3]),
    'batch_normalization': lambda: (F.batch_normalization, [variable(3, 4), *[variable(4)] * 2]),
    'n_step_gru': lambda: (F.n_step_gru, rnn_arguments(6, 1)),
    'n_step_bigru': lambda: (F.n_step_bigru, rnn_arguments(6, 1, 2)),
    'n_step_lstm': lambda: (F.n_step_lstm, rnn_arguments(8, 2)),
    'n_step_bilstm': lambda: (F.n_step_bilstm, rnn_arguments(8, 2, 2)),
    'n_step_rnn': lambda: (F.n_step_rnn, rnn_arguments(2, 1)),
    'GoogLeNet.forward': lambda: vision(googlenet.GoogLeNet, 'forward'),
    'GoogLeNet.extract': lambda: vision(googlenet.GoogLeNet, 'extract'),
    'ResNetLayers.forward': lambda: vision(resnet.ResNetLayers, 'forward'),
    'ResNetLayers.extract': lambda: vision(resnet.ResNetLayers, 'extract'),
    'VGGLayers.forward': lambda: vision(vgg.VGGLayers, 'forward'),
    'VGGLayers.extract': lambda: vision(vgg.VGGLayers, 'extract'),
    'BatchNormalization.forward': lambda: (L.BatchNormalization(4), [variable(3, 4)]),
    'NStepLSTMBase.forward':
        lambda: (L.NStepLSTM(2, 3, 4, .5), [None, None, [variable(2, 3), variable(1, 3)]]),
    'NStepRNNBase.forward':
        lambda: (L.NStepGRU(2, 3, 4, .5), [None, [variable(2, 3), variable(1, 3)]]),
}
ROWS = {path: (n_same, names.split()) for rows in old_arguments.CALLS.values()
        for path, (n_same, names) in rows.items()}


def flat(x):
    """Return the Variables in nested lists, tuples and dictionaries."""
    if isinstance(x, dict):
        x = list(x.values())
    if isinstance(x, list | tuple):
        return [v for y in x for v in flat(y)]
    return [x] if isinstance(x, chainer.Variable) else []


def run(name, call, monkeypatch):
    """Return outputs, gradients, persistent values, and the configuration of each function."""
    np.random.seed(0)
    function, args = CASES[name]()
    configurations = []
    apply = chainer.FunctionNode.apply

    def record(node, inputs):
        c = chainer.config
        configurations.append((c.train, c.enable_backprop, c.use_cudnn, c.cudnn_deterministic))
        return apply(node, inputs)

    with monkeypatch.context() as patched:
        patched.setattr(chainer.FunctionNode, 'apply', record)
        ys = flat(call(function, args))
    for y in ys:
        y.grad = np.random.standard_normal(y.shape).astype(y.dtype)
    if any(y.creator is not None for y in ys):
        chainer.backward([y for y in ys if y.creator is not None])
    link = function if isinstance(function, chainer.Link) else getattr(function, '__self__', None)
    parameters = [] if link is None else list(link.params())
    state = [getattr(child, p) for child in ([] if link is None else link.links())
             for p in child._persistent]
    arrays = [y.array for y in ys] + [v.grad for v in flat(args) + parameters] + state
    bits = [None if a is None else (np.asarray(a).dtype, np.asarray(a).tobytes()) for a in arrays]
    return bits, [y.creator is None for y in ys], configurations


@contextlib.contextmanager
def options(config):
    with contextlib.ExitStack() as stack:
        for name, value in config.items():
            stack.enter_context(chainer.using_config(name, value))
        yield


def old_calls(row):
    """Yield positional arguments, keyword arguments and options for ``chainer.config``."""
    _, names = row
    for name in MODERN.keys() & {*names} - {'finetune'}:
        for value, config in MODERN[name].items():
            yield (), {name: value}, config
    if MODERN.keys() >= {*names} and row != ROWS['rrelu']:
        n_values = max(len(MODERN[name]) for name in names)
        repeated = [itertools.cycle(MODERN[name].items()) for name in names]
        for values in itertools.islice(zip(*repeated, strict=True), n_values):
            yield (tuple(value for value, _ in values), {},
                   {key: x for _, config in values for key, x in config.items()})


@pytest.mark.parametrize('name', CASES)
def test_the_same_bits(name, monkeypatch):
    configuration = dict(vars(chainer.config), **vars(chainer.global_config))
    modern = {}
    for n, (positional, keywords, config) in enumerate(old_calls(ROWS[name])):
        with chainer.using_config('train', n % 2 == 0):
            key = n % 2, str(config)
            if key not in modern:
                with options(config):
                    modern[key] = run(name, lambda f, args: f(*args), monkeypatch)
            with warnings.catch_warnings():
                warnings.simplefilter('ignore', DeprecationWarning)
                found = run(name, lambda f, args, p=positional, k=keywords: f(*args, *p, **k),
                            monkeypatch)
        assert found == modern[key], (positional, keywords)
    assert dict(vars(chainer.config), **vars(chainer.global_config)) == configuration


@pytest.mark.parametrize('name', CASES)
def test_one_warning_per_line(name):
    function, args = CASES[name]()
    for argument in MODERN.keys() & {*ROWS[name][1]} - {'finetune'}:
        for value in True, False:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter('default')
                for _ in range(3):
                    function(*args, **{argument: value})
                function(*args, **{argument: value})
            function_line = test_one_warning_per_line.__code__.co_firstlineno + 8
            assert [(w.filename, w.lineno) for w in caught] == [
                (__file__, function_line), (__file__, function_line + 1)]
            for w in caught:
                assert w.category is DeprecationWarning
                assert f'({argument}=...) belongs to the Chainer 1 API: use' in str(w.message)


@pytest.mark.parametrize('name', CASES)
def test_errors(name):
    function, args = CASES[name]()
    for keywords in {'unknown': 1}, {'wscale': 1}, {'training': False}:
        with pytest.raises(TypeError, match='unexpected keyword argument'):
            function(*args, **keywords)
    n = len(ROWS[name][1])
    with pytest.raises(TypeError, match=r'positional argument|multiple values'):
        function(*args, *[True] * (n + 3))
    if name != 'rrelu':
        with pytest.raises((TypeError, ValueError)):
            function(*args, True, **{ROWS[name][1][0]: True})
    if 'volatile' in ROWS[name][1]:
        with pytest.raises(ValueError, match='maybe'):
            function(*args, volatile='maybe')


@pytest.mark.parametrize('function, args', [
    (F.relu, ['x']),
    (L.Linear.__init__, ['self', 'in_size', 'out_size', 'nobias', 'initialW', 'initial_bias']),
    (L.GRU.__init__, ['self', 'in_size', 'out_size', 'init', 'inner_init', 'bias_init']),
    (L.NStepLSTM, ['self', 'n_layers', 'in_size', 'out_size', 'dropout'])])
def test_signatures(function, args):
    """Those of Chainer 7.8.1."""
    assert inspect.getfullargspec(function).args == args
    positional = [name for name, parameter in inspect.signature(function).parameters.items()
                  if parameter.kind == parameter.POSITIONAL_OR_KEYWORD]
    assert positional == args[isinstance(function, type):]


def test_finetune_uses_the_batch():
    x = variable(3, 4)
    old, new = L.BatchNormalization(4), L.BatchNormalization(4)
    with pytest.warns(DeprecationWarning, match='test='):
        y = old(x, True, True)
    np.testing.assert_array_equal(y.array, new(x, finetune=True).array)
    assert old.N == new.N == 1


OPTIONS_OF_LINKS = [
    (lambda: L.Convolution2D(2, 1, 1, use_cudnn=False, deterministic=True), ('never', True)),
    (lambda: L.Deconvolution2D(2, 1, 1, deterministic=True), ('auto', True)),
    (lambda: L.DilatedConvolution2D(2, 1, 1, use_cudnn=False), ('never', False)),
    (lambda: L.ConvolutionND(2, 2, 1, 1, use_cudnn=False), ('never', False)),
    (lambda: L.DeconvolutionND(2, 2, 1, 1, use_cudnn=False), ('never', False)),
    (lambda: L.BatchNormalization(2, use_cudnn=False), ('never', False)),
    (lambda: L.Convolution2D(2, 1, 1, use_cudnn=True, deterministic=False), ('auto', False)),
    (lambda: lambda x: F.max_pooling_2d(x, 2, use_cudnn=False), ('never', False)),
    (lambda: lambda x: F.relu(x, False), ('never', False)),
    (lambda: F.ReLU(use_cudnn=False), ('never', False)),
    (lambda: lambda x: F.convolution_2d(
        x, variable(2, 2, 1, 1), deterministic=True), ('auto', True))]


@pytest.mark.parametrize('make, expected', OPTIONS_OF_LINKS)
def test_options_also_apply_to_later_calls_and_gradients(make, expected, monkeypatch):
    seen, apply = [], chainer.FunctionNode.apply

    def record(node, inputs):
        seen.append((chainer.config.use_cudnn, chainer.config.cudnn_deterministic))
        return apply(node, inputs)

    monkeypatch.setattr(chainer.FunctionNode, 'apply', record)
    monkeypatch.setattr(chainer.global_config, 'use_torch', 'never')  # its gradients apply no node
    with pytest.warns(DeprecationWarning):
        link = make()
        if isinstance(link, chainer.Link):
            link = pickle.loads(pickle.dumps(link)).copy()
        y = link(variable(1, 2, 4, 4))
    n_forward = len(seen)
    y.grad = np.ones(y.shape, 'f')
    y.backward()
    assert len(seen) > n_forward > 0
    assert {*seen} == {expected}
    seen.clear()
    F.relu(L.Convolution2D(2, 1, 1)(variable(1, 2, 4, 4)))
    assert {*seen} == {('auto', False)}


def test_train_of_a_link():
    with pytest.warns(DeprecationWarning):
        link = L.StatefulZoneoutLSTM(2, 3, 1., 1., False)
    trained = L.StatefulZoneoutLSTM(2, 3, 1., 1.)
    np.testing.assert_array_equal(trained(variable(1, 2)).array, 0)  # all old
    assert np.all(link(variable(1, 2)).array != 0)


def test_pickled_initializer():
    with pytest.warns(DeprecationWarning):
        link = L.Linear(None, 3, wscale=4, initialW=chainer.initializers.One())
    loaded = pickle.loads(pickle.dumps(link))
    loaded(variable(1, 2))
    np.testing.assert_array_equal(loaded.W.array, 2)


ZONEOUT = '''
import pickle, sys
import chainer.links as L
import numpy as np

def outputs(link):
    np.random.seed(1)
    link.reset_state()
    return [link(np.ones((2, 3), 'f')).array.tolist() for _ in range(3)]

'''


def test_links_keep_their_options_in_another_process(python, tmp_path):
    """Zoneout is random while training, and with ``train=False`` an expectation."""
    python(ZONEOUT + '''
import chainer, warnings
warnings.simplefilter('ignore', DeprecationWarning)
for options in {}, {'train': False}:
    np.random.seed(0)
    link = L.StatefulZoneoutLSTM(3, 4, c_ratio=.5, h_ratio=.5, **options)
    if not options:
        with chainer.using_config('train', False):
            expected = outputs(link)
        assert outputs(link) != expected
assert outputs(link) == expected
with open('link', 'wb') as file:
    pickle.dump([expected, link], file)
''')
    python(ZONEOUT + '''
with open('link', 'rb') as file:
    expected, link = pickle.load(file)
assert link.train is False
assert outputs(link) == expected
''')
