"""Chainer gives the same dtypes, shapes, values and errors on a GPU as on the CPU.

This runs every function, link, optimizer, hook and initializer in float16, float32 and float64,
with options that are Python's numbers or NumPy's scalars. CuPy 14 and NumPy 2 promote the latter
differently from the versions that Chainer was written for.
"""

import contextlib
import inspect
import operator

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import initializers, optimizer_hooks, optimizers

pytest.importorskip('scipy', reason='the cases of functions need it')
from calls_of_functions import CASES, OPTIONS, Draw

pytestmark = [pytest.mark.gpu, pytest.mark.mpi_skip]

DTYPES = ['float16', 'float32', 'float64']
SCALARS = [float, np.float32, np.float64]
TOLERANCES = {'float16': 2e-2, 'float32': 1e-4, 'float64': 1e-6}

# These draw numbers, which differ between devices. Only dtypes and shapes are compared.
RANDOM = {'dropout', 'gaussian', 'gumbel_softmax', 'rrelu', 'simplified_dropconnect', 'zoneout'}


@pytest.fixture
def gpu(device):
    return chainer.get_device(f'@cupy:{device.id}')


def sent(x, device):
    """Return arguments on a device, also in lists; Variables keep their history."""
    if isinstance(x, list | tuple):
        return type(x)(sent(each, device) for each in x)
    if isinstance(x, dict):
        return {name: sent(each, device) for name, each in x.items()}
    if isinstance(x, chainer.Variable):
        return F.copy(x, device)
    if isinstance(x, chainer.utils.CooMatrix):
        return chainer.utils.CooMatrix(
            *map(device.send, (x.data.array, x.row, x.col)), x.shape, x.order)
    if callable(x) and not isinstance(x, type):
        return lambda *args: sent(x(*args), device)
    return device.send(x) if isinstance(x, np.ndarray) else x


def with_scalars(x, scalar):
    """Return arguments with a type of scalar for Python's floats."""
    if isinstance(x, dict):
        return {name: with_scalars(each, scalar) for name, each in x.items()}
    return scalar(x) if type(x) is float else x


def float_defaults(f):
    parameters = inspect.signature(f).parameters.values()
    return {p.name: p.default for p in parameters if type(p.default) is float}


def arrays_of(y):
    """Return the arrays of nested results, on the CPU."""
    if isinstance(y, list | tuple):
        return [array for each in y for array in arrays_of(each)]
    if isinstance(y, chainer.Variable):
        y = y.array
    return [chainer.backends.cuda.to_cpu(y)] if hasattr(y, 'dtype') else []


def variables_of(y):
    ys = y if isinstance(y, list | tuple) else [y]
    return [y for y in ys if isinstance(y, chainer.Variable) and y.dtype.kind == 'f'
            and y.requires_grad and y.creator is not None]


def outcome(call):
    """Return the arrays that a call gives, or the type of its error."""
    np.random.seed(0)
    with np.errstate(all='ignore'):
        try:
            return call()
        except Exception as error:
            return error


def check_same(on_cpu, on_gpu, tolerance, *, numbers=True):
    if isinstance(on_cpu, Exception):
        # What Chainer refuses, it refuses on both. What only NumPy cannot do may work on a GPU.
        assert isinstance(on_cpu, chainer.utils.type_check.InvalidType | TypeError), repr(on_cpu)
        assert isinstance(on_cpu, TypeError) or type(on_gpu) is type(on_cpu), repr(on_gpu)
        return
    assert not isinstance(on_gpu, Exception), repr(on_gpu)
    assert on_cpu
    assert [(y.dtype, y.shape) for y in on_gpu] == [(y.dtype, y.shape) for y in on_cpu]
    for a, b in zip(on_cpu, on_gpu, strict=True):
        if numbers:
            np.testing.assert_allclose(b, a, tolerance, tolerance)


class Recorder:
    """A function that runs on a device, and remembers whether it had float options."""

    def __init__(self, f, device, scalar):
        self.f = f
        self.device = device
        self.scalar = scalar

    def __call__(self, *args, **options):
        if self.scalar is not float:
            options = {**OPTIONS.get(self.f.__name__, {}), **float_defaults(self.f), **options}
        args = tuple(with_scalars(x, self.scalar) for x in args)
        options = with_scalars(options, self.scalar)
        return self.f(*sent(args, self.device), **sent(options, self.device))


def has_float_options(name):
    seen = []

    def f(*args, **options):
        seen.extend(x for x in [*args, *options.values()] if type(x) is float)

    with contextlib.suppress(TypeError):  # if the case uses the result
        CASES[name](f, Draw())
    return bool(seen or name in OPTIONS or float_defaults(getattr(F, name)))


FUNCTIONS = [(name, scalar) for name in sorted(CASES) for scalar in SCALARS
             if scalar is float or has_float_options(name)]


@pytest.mark.sample(150)  # each compiles kernels of its own
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize(('name', 'scalar'), FUNCTIONS,
                         ids=[f'{name}-{scalar.__name__}' for name, scalar in FUNCTIONS])
def test_function(gpu, name, scalar, dtype):
    def run(device):
        draw = Draw(dtype)
        y = CASES[name](Recorder(getattr(F, name), device, scalar), draw)
        results = arrays_of(y)
        sums = [F.sum(F.cast(y * y, 'd')) for y in variables_of(y)]
        if sums:
            sum(sums).backward()
        return results + [x.grad for x in draw.inputs if x.grad is not None]

    on_cpu, on_gpu = (outcome(lambda d=d: run(d)) for d in (chainer.get_device('@numpy'), gpu))
    tolerance = TOLERANCES[dtype]
    if (name, dtype) == ('group_normalization', 'float16'):
        # The gradient is a difference of float16 numbers, divided by a standard deviation. In this
        # case 1/std is up to 14, which amplifies rounding. With float32 gammas devices agree.
        tolerance *= 4
    check_same(on_cpu, on_gpu, tolerance, numbers=name not in RANDOM)


OPERATORS = ['add', 'sub', 'mul', 'truediv', 'floordiv', 'pow']


@pytest.mark.parametrize('scalar', [int, *SCALARS, np.int64], ids=lambda scalar: scalar.__name__)
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('name', OPERATORS)
def test_arithmetic_with_a_scalar(gpu, name, dtype, scalar):
    f = getattr(operator, name)

    def run(device):
        x = chainer.Variable(device.send(np.linspace(.3, .9, 6).astype(dtype)))
        ys = [f(x, scalar(2)), f(scalar(2), x)]
        if any(y.creator is not None for y in ys):
            sum(F.sum(y * y) for y in ys).backward()
        return arrays_of([*ys, x.grad])

    on_cpu, on_gpu = (outcome(lambda d=d: run(d)) for d in (chainer.get_device('@numpy'), gpu))
    check_same(on_cpu, on_gpu, TOLERANCES[dtype])


def test_every_function_link_and_initializer_has_a_case():
    def classes(module, base):
        return {name for name, each in inspect.getmembers(module, inspect.isclass)
                if issubclass(each, base)}

    assert classes(L, chainer.Link) - WITHOUT_CASES == set(LINKS)
    assert classes(optimizers, chainer.GradientMethod) == set(OPTIMIZERS)
    assert {name for name, _ in inspect.getmembers(optimizer_hooks, inspect.isclass)} == set(HOOKS)
    assert classes(initializers, chainer.Initializer) == set(INITIALIZERS)


IMAGE, ROW, STATE = (2, 4, 6, 6), (4, 6), (4, 3)
LABELS = np.array([1, 0, 2, 1], 'i')
TREE = L.BinaryHierarchicalSoftmax.create_huffman_tree({0: 3, 1: 2, 2: 1})


def given(*args, **options):
    return args, options


#: Links: the arguments, and inputs, which are arrays or shapes of random ones.
LINKS = {
    'Bias': (given(1, (6,)), [ROW]),
    'Bilinear': (given(6, 6, 3), [ROW, ROW]),
    'BinaryHierarchicalSoftmax': (given(6, TREE), [ROW, LABELS]),
    'BlackOut': (given(6, [3, 2, 1], 2), [ROW, LABELS]),
    'Convolution1D': (given(4, 3, 3), [(2, 4, 6)]),
    'Convolution2D': (given(4, 3, 3), [IMAGE]),
    'Convolution3D': (given(2, 3, 3), [(1, 2, 4, 4, 4)]),
    'ConvolutionND': (given(2, 4, 3, 3), [IMAGE]),
    'CRF1d': (given(3), [STATE, STATE]),
    'Deconvolution1D': (given(4, 3, 3), [(2, 4, 6)]),
    'Deconvolution2D': (given(4, 3, 3), [IMAGE]),
    'Deconvolution3D': (given(2, 3, 3), [(1, 2, 4, 4, 4)]),
    'DeconvolutionND': (given(2, 4, 3, 3), [IMAGE]),
    'DeformableConvolution2D': (given(4, 3, 3), [IMAGE]),
    'DepthwiseConvolution2D': (given(4, 2, 3), [IMAGE]),
    'DilatedConvolution2D': (given(4, 3, 3, dilate=2), [IMAGE]),
    'EmbedID': (given(4, 3), [LABELS]),
    'Highway': (given(6), [ROW]),
    'Inception': (given(4, 2, 2, 2, 2, 2, 2), [IMAGE]),
    'InceptionBN': (given(4, 2, 2, 2, 2, 2, 'max', 2), [IMAGE]),
    'Linear': (given(6, 3, initial_bias=.5), [ROW]),
    'LocalConvolution2D': (given(4, 3, (6, 6), 3), [IMAGE]),
    'Maxout': (given(6, 3, 2), [ROW]),
    'MLPConvolution2D': (given(4, (3, 2), 3), [IMAGE]),
    'NegativeSampling': (given(6, [3, 2, 1], 2), [ROW, LABELS]),
    'Parameter': (given(np.ones(3)), []),
    'PReLU': (given((6,), .25), [ROW]),
    'Scale': (given(1, (6,)), [ROW]),
    'SimplifiedDropconnect': (given(6, 3), [ROW]),
    'Swish': (given((6,), 1.), [ROW]),
    'BatchNormalization': (given(6), [ROW]),
    'BatchRenormalization': (given(6), [ROW]),
    'GroupNormalization': (given(2, 4), [IMAGE]),
    'LayerNormalization': (given(6), [ROW]),
    'DecorrelatedBatchNormalization': (given(4, 2), [(9, 4)]),
    'GRU': (given(6, 3, bias_init=.5), [ROW]),
    'LSTM': (given(6, 3, forget_bias_init=1.), [ROW]),
    'StatefulGRU': (given(6, 3), [ROW]),
    'StatefulMGU': (given(6, 3), [ROW]),
    'StatefulPeepholeLSTM': (given(6, 3), [ROW]),
    'StatefulZoneoutLSTM': (given(6, 3, c_ratio=0., h_ratio=0.), [ROW]),
    'StatelessGRU': (given(6, 3), [STATE, ROW]),
    'StatelessLSTM': (given(6, 3), [STATE, STATE, ROW]),
    'StatelessMGU': (given(6, 3), [STATE, ROW]),
    'ChildSumTreeLSTM': (given(6, 3), [STATE, STATE, ROW]),
    'NaryTreeLSTM': (given(6, 3, 1), [STATE, STATE, ROW]),
    **dict.fromkeys(['NStepBiGRU', 'NStepBiLSTM', 'NStepBiRNNReLU', 'NStepBiRNNTanh', 'NStepGRU',
                     'NStepLSTM', 'NStepRNNReLU', 'NStepRNNTanh'],
                    (given(2, 6, 3, 0.), [ROW, ROW])),
}
RANDOM_LINKS = {'BlackOut', 'NegativeSampling', 'SimplifiedDropconnect'}
#: Networks with pretrained parameters, and links that only call something else.
WITHOUT_CASES = {'Classifier', 'GoogLeNet', 'ResNet50Layers', 'ResNet101Layers',
                 'ResNet152Layers', 'TheanoFunction', 'VGG16Layers', 'VGG19Layers'}


def call(link, xs):
    if isinstance(link, L.CRF1d):
        return link(xs, [link.device.send(LABELS)] * len(xs))
    if hasattr(link, 'n_cells'):  # links of sequences; they begin with no states
        return link(*[None] * link.n_cells, xs)
    return link(*xs)


def has_floats(name):
    (args, options), _ = LINKS[name]
    return float_defaults(getattr(L, name)) or float in map(type, [*args, *options.values()])


OF_LINKS = [(name, scalar) for name in LINKS for scalar in SCALARS
            if scalar is float or has_floats(name)]


@pytest.mark.sample(100)
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize(('name', 'scalar'), OF_LINKS,
                         ids=[f'{name}-{scalar.__name__}' for name, scalar in OF_LINKS])
def test_link(gpu, name, dtype, scalar):
    (args, options), inputs = LINKS[name]

    def run(device):
        with chainer.using_config('dtype', np.dtype(dtype)):
            make = Recorder(getattr(L, name), chainer.get_device('@numpy'), scalar)
            link = make(*(x.astype(dtype) if isinstance(x, np.ndarray) else x for x in args),
                        **options)
        link.to_device(device)
        random = np.random.RandomState(1)
        xs = [chainer.Variable(device.send(
            x if isinstance(x, np.ndarray) else random.uniform(.1, .9, x).astype(dtype)))
            for x in inputs]
        y = call(link, xs)
        y = sum(F.sum(y * y) for y in variables_of(y))
        y.backward()
        state = [x for each in link.links() for key in sorted(each._persistent)
                 if hasattr(x := getattr(each, key), 'dtype')]
        grads = [v.grad for v in [*xs, *(p for _, p in sorted(link.namedparams()))]]
        return arrays_of([y, *(g for g in grads if g is not None), *state])

    on_cpu, on_gpu = (outcome(lambda d=d: run(d)) for d in (chainer.get_device('@numpy'), gpu))
    tolerance = 3 * TOLERANCES[dtype]
    if (name, dtype) == ('InceptionBN', 'float16'):
        # Gradients pass several batch normalizations, each of which amplifies rounding by 1/std.
        # Compared with float64, those of the CPU differ more than those of the GPU.
        tolerance *= 5
    check_same(on_cpu, on_gpu, tolerance, numbers=name not in RANDOM_LINKS)


#: The Chainer optimizers that update by a rule.
OPTIMIZERS = sorted(name for name, each in inspect.getmembers(optimizers, inspect.isclass)
                    if issubclass(each, chainer.optimizer.GradientMethod))


def updated(device, dtype, optimizer, hook=None, n=2):
    """Return the parameter and the numbers of the optimizer's state after n updates."""
    random = np.random.RandomState(1)
    link = chainer.Link()
    with link.init_scope():
        link.p = chainer.Parameter(random.uniform(.1, .9, (3, 4)).astype(dtype))
    link.to_device(device)
    optimizer.setup(link)
    if hook is not None:
        optimizer.add_hook(hook)
    for _ in range(n):
        link.p.grad = device.send(random.uniform(.1, .9, (3, 4)).astype(dtype))
        optimizer.update()
    state = link.p.update_rule.state or {}
    return arrays_of([link.p, *(state[key].astype('d') for key in sorted(state)
                                if hasattr(state[key], 'dtype'))])


@pytest.mark.parametrize('scalar', SCALARS, ids=lambda scalar: scalar.__name__)
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_optimizer(gpu, name, dtype, scalar):
    def run(device):
        optimizer = getattr(optimizers, name)()
        for key, value in optimizer.hyperparam.get_dict().items():
            setattr(optimizer.hyperparam, key, with_scalars(value, scalar))
        if (name, dtype) == ('RMSprop', 'float16'):
            optimizer.eps = scalar(1e-4)  # Chainer refuses the default, which float16 rounds to 0
        return updated(device, dtype, optimizer)

    on_cpu, on_gpu = (outcome(lambda d=d: run(d)) for d in (chainer.get_device('@numpy'), gpu))
    tolerance = TOLERANCES[dtype]
    if (name, dtype) == ('MSVAG', 'float32'):
        tolerance *= 10  # the first update divides rounding errors, of 6e-8, by 1e-4
    check_same(on_cpu, on_gpu, tolerance)


HOOKS = {
    'GradientClipping': 1., 'GradientHardClipping': (.2, .6), 'GradientLARS': .01, 'Lasso': .1,
    'GradientNoise': .1, 'WeightDecay': .1,
}


@pytest.mark.parametrize('scalar', SCALARS, ids=lambda scalar: scalar.__name__)
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('name', HOOKS)
def test_hook(gpu, name, dtype, scalar):
    options = HOOKS[name] if isinstance(HOOKS[name], tuple) else (HOOKS[name],)

    def run(device):
        hook = getattr(optimizer_hooks, name)(*(scalar(x) for x in options))
        return updated(device, dtype, optimizers.SGD(.1), hook)

    on_cpu, on_gpu = (outcome(lambda d=d: run(d)) for d in (chainer.get_device('@numpy'), gpu))
    check_same(on_cpu, on_gpu, TOLERANCES[dtype], numbers=name != 'GradientNoise')


INITIALIZERS = {
    'Constant': (.3,), 'Identity': (.3,), 'NaN': (), 'One': (), 'Zero': (), 'Normal': (.3,),
    'Uniform': (.3,), 'GlorotNormal': (.3,), 'GlorotUniform': (.3,), 'HeNormal': (.3,),
    'HeUniform': (.3,), 'LeCunNormal': (.3,), 'LeCunUniform': (.3,), 'Orthogonal': (.3,),
    'UpsamplingDeconvFilter': (), 'DownsamplingConvFilter': (),
}
FILTERS = {'UpsamplingDeconvFilter', 'DownsamplingConvFilter'}
CONSTANTS = {'Constant', 'Identity', 'NaN', 'One', 'Zero', *FILTERS}


@pytest.mark.parametrize('scalar', SCALARS, ids=lambda scalar: scalar.__name__)
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('name', INITIALIZERS)
def test_initializer(gpu, name, dtype, scalar):
    def run(device):
        initializer = getattr(initializers, name)(*(scalar(x) for x in INITIALIZERS[name]))
        array = device.xp.empty((3, 3, 4, 4) if name in FILTERS else (4, 4), dtype)
        initializer(array)
        return arrays_of(array)

    on_cpu, on_gpu = (outcome(lambda d=d: run(d)) for d in (chainer.get_device('@numpy'), gpu))
    check_same(on_cpu, on_gpu, TOLERANCES[dtype], numbers=name in CONSTANTS)
    if not isinstance(on_gpu, Exception) and name not in CONSTANTS:
        assert 0 < np.abs(on_gpu[0]).max() < 3


@pytest.mark.parametrize('bound', ['float', 'float32', 'float64', 'array'])
@pytest.mark.parametrize('dtype', DTYPES)
def test_bounds_of_clip(gpu, dtype, bound):
    """Of any dtype, and also arrays."""
    x = np.linspace(-1, 1, 9).astype(dtype)
    low = .25 if bound == 'float' else getattr(np, bound)(.25) if bound != 'array' else None
    results = []
    for device in (chainer.get_device('@numpy'), gpu):
        limit = device.send(np.full(9, .25)) if low is None else low
        v = chainer.Variable(device.send(x))
        y = F.clip(v, limit, None)
        F.sum(y).backward()
        assert y.dtype == v.grad.dtype == x.dtype
        results.append(arrays_of([y, v.grad]))
    check_same(*results, 0)


#: Distributions with the number of their parameters, which are arrays of .3.
DISTRIBUTIONS = {
    'Bernoulli': 1, 'Beta': 2, 'Categorical': 1, 'Cauchy': 2, 'Chisquare': 1, 'Exponential': 1,
    'Gamma': 2, 'Geometric': 1, 'Gumbel': 2, 'Laplace': 2, 'LogNormal': 2, 'Normal': 2, 'Pareto': 2,
    'Poisson': 1, 'Uniform': 2,
}


#: CuPy draws numbers of these in float32 and float64 only.
NOT_IN_FLOAT16 = {'Cauchy', 'Exponential', 'Gumbel', 'LogNormal', 'Pareto'}


@pytest.mark.parametrize(('name', 'dtype'), [
    (name, dtype) for name in DISTRIBUTIONS for dtype in DTYPES
    if dtype != 'float16' or name not in NOT_IN_FLOAT16])
def test_samples_of_a_distribution(gpu, name, dtype):
    def run(device):
        values = np.arange(1, 1 + DISTRIBUTIONS[name]) * .3
        parameters = [device.send(np.full((2, 3), value, dtype)) for value in values]
        if name == 'Categorical':
            parameters = [device.send(np.full((2, 2), .5, dtype))]
        return arrays_of(getattr(chainer.distributions, name)(*parameters).sample(4))

    on_cpu, on_gpu = (outcome(lambda d=d: run(d)) for d in (chainer.get_device('@numpy'), gpu))
    check_same(on_cpu, on_gpu, 0, numbers=False)
