"""A law of runs, sequences of functions whose gradients PyTorch computes in one call."""

import contextlib
import copy
import dataclasses

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import Variable
from hypothesis import strategies as st
from laws.law import law, planted

ROWS, COLUMNS = 3, 4
LABELS = np.array([2, 1, 0], 'i')
BITS = np.array([[0, 1, -1, 1], [1, 1, 0, 0], [0, -1, 0, 1]], 'i')
CONDITION = BITS > 0
TOLERANCES = {'f': 1e-3, 'd': 1e-9}


class Doubled(chainer.FunctionNode):
    """A user-defined function, which ends a run."""

    def forward(self, inputs):
        return 2 * inputs[0],

    def backward(self, indexes, grads):
        return 2 * grads[0],


class Square(chainer.Function):
    """An old-style function."""

    def forward(self, inputs):
        self.retain_inputs((0,))
        return inputs[0] ** 2,

    def backward(self, inputs, grads):
        return 2 * inputs[0] * grads[0],


def images(f):
    """Return a function of matrices that calls a function of images.

    The program cannot change the images: convolutions may save a copy in another memory layout.
    """
    def function(m, x, y):
        result = f(m, F.reshape(x * 1, (1, ROWS, 2, 2)))
        return F.reshape(result, (ROWS, -1))[:, :COLUMNS]

    return function


#: Functions of the model and two matrices. Their results have the same shape as the matrices.
FUNCTIONS = {
    'add': lambda m, x, y: x + y, 'sub': lambda m, x, y: x - y, 'mul': lambda m, x, y: x * y / 4,
    'same': lambda m, x, y: x * x / 4 + x, 'add constant': lambda m, x, y: x + .5,
    'times constant': lambda m, x, y: x * -.75, 'neg': lambda m, x, y: -x,
    'relu': lambda m, x, y: F.relu(x), 'leaky': lambda m, x, y: F.leaky_relu(x, .3),
    'tanh': lambda m, x, y: F.tanh(x), 'sigmoid': lambda m, x, y: F.sigmoid(x),
    'softmax': lambda m, x, y: F.softmax(x), 'log softmax': lambda m, x, y: F.log_softmax(x, 0),
    'linear': lambda m, x, y: m.linear(x),
    # Equal elements become rounding errors around 0, which relu may keep or not. So add .01.
    'norm': lambda m, x, y: m.norm(x) + .01,
    'parameter': lambda m, x, y: x + F.broadcast_to(m.b, x.shape),
    'matmul': lambda m, x, y: F.matmul(F.matmul(x, x, transb=True), y) / 9,
    'transpose': lambda m, x, y: F.transpose(F.tanh(F.transpose(x))),
    'split': lambda m, x, y: F.concat(F.split_axis(x, [1, 3], 1)[::-1]),
    'half': lambda m, x, y: F.concat([*F.split_axis(x, 2, 1)][:1] * 2),
    'reshape': lambda m, x, y: F.reshape(F.reshape(x, (-1,)), y.shape),
    'item': lambda m, x, y: x[::-1], 'dropout': lambda m, x, y: F.dropout(x, .3),
    'sum': lambda m, x, y: F.broadcast_to(F.sum(x, 1, keepdims=True), x.shape) / 4,
    'mean': lambda m, x, y: y * F.broadcast_to(F.mean(x), x.shape),
    'doubled': lambda m, x, y: Doubled().apply((x,))[0] / 2, 'old': lambda m, x, y: Square()(x) / 8,
    'forget': lambda m, x, y: F.forget(lambda v: F.tanh(m.linear(v)), x),
    'abs': lambda m, x, y: abs(x), 'div': lambda m, x, y: x / (y * y + 1),
    'inverse': lambda m, x, y: 1 / (x * x + 1), 'rest': lambda m, x, y: 1 - x,
    'power': lambda m, x, y: (x * x + .1) ** .75, 'cube': lambda m, x, y: x ** 3 / 8,
    'exp': lambda m, x, y: F.exp(-x * x), 'log': lambda m, x, y: F.log(x * x + .1),
    'log1p': lambda m, x, y: F.log1p(F.square(x)), 'sqrt': lambda m, x, y: F.sqrt(x * x + .1),
    'maximum of ties': lambda m, x, y: F.maximum(x, F.relu(x)),
    'minimum of ties': lambda m, x, y: F.minimum(F.relu(x), x * 1),
    'elu': lambda m, x, y: F.elu(F.relu(x) - .5), 'softplus': lambda m, x, y: F.softplus(x, 2.),
    'leaky of ties': lambda m, x, y: F.leaky_relu(F.relu(x)),
    'swish': lambda m, x, y: F.swish(x, m.b),
    'between': lambda m, x, y: F.linear_interpolate(F.sigmoid(x), x, y + 1),
    'layer': lambda m, x, y: F.layer_normalization(x * 1, m.b, m.b),
    'expand': lambda m, x, y: F.squeeze(F.expand_dims(x, 1)) + y,
    'swap': lambda m, x, y: F.swapaxes(F.tanh(F.swapaxes(x, 0, 1)), -1, -2),
    'move': lambda m, x, y: F.rollaxis(F.moveaxis(F.expand_dims(x, 0), 0, 2), 2)[0],
    'stack': lambda m, x, y: F.stack(F.separate(x, 1)[::-1], 1),
    'flip': lambda m, x, y: F.flip(x, 0), 'tile': lambda m, x, y: F.tile(x[:, 1:3], (1, 2)),
    'pad': lambda m, x, y: F.pad(x[:, 1:], ((0, 0), (1, 0)), 'constant'),
    'rows': lambda m, x, y: x[[0, 2, 0]], 'row': lambda m, x, y: x + x[-1, None],
    'where': lambda m, x, y: F.where(CONDITION, x, y),
    'embedding': lambda m, x, y: x + F.embed_id(LABELS, m.linear.W, 1),
    'squared error': lambda m, x, y: F.squared_error(x, y) / 4,
    'absolute error': lambda m, x, y: F.absolute_error(x, y),
    'mean squared': lambda m, x, y: x * F.broadcast_to(F.mean_squared_error(x, y), x.shape) / 4,
    'mean absolute': lambda m, x, y: x * F.broadcast_to(F.mean_absolute_error(x, y), x.shape) / 4,
    'huber': lambda m, x, y: F.huber_loss(x, y, 1., reduce='no'),
    'entropies': lambda m, x, y: F.sigmoid_cross_entropy(x, BITS, reduce='no'),
    'entropy': lambda m, x, y: x + F.broadcast_to(F.sigmoid_cross_entropy(x, BITS), x.shape),
    'classes': lambda m, x, y: x + F.broadcast_to(F.softmax_cross_entropy(x, LABELS), x.shape),
    'convolution': images(lambda m, x: m.convolution(x)),
    'maximum': images(lambda m, x: F.concat([F.max_pooling_2d(x, 2, 1, 1)[:, :, :2, :2]])),
    'average': images(lambda m, x: F.average_pooling_2d(x, 3, 1, 1)),
}


def unchain(m, x):
    x.unchain()


def unchain_backward(m, x):
    x.unchain_backward()


def cut_and_restore(m, x):
    node = x.node
    creator = node.creator_node
    node.creator_node = None
    node.creator_node = creator


def overwrite(m, x):
    x.array[...] *= .5


def replace(m, x):
    x.array = x.array * .5


def copied(m, x):
    return copy.copy(x)


def deeply(m, x):
    return copy.deepcopy(x)


def read(m, x):
    assert x.array.shape == x.node.shape == x.shape and x.array.dtype == x.node.dtype == x.dtype
    assert x.node.data is None or x.node.data is x.array


def variable_of_node(m, x):
    return x.node.get_variable()


def constant(m, x):
    return Variable(x.array, requires_grad=False)


def no_backprop(m, x):
    with chainer.no_backprop_mode():
        return F.tanh(m.linear(x))


def change_parameter(m, x):
    m.linear.W.array *= .9


def replace_parameter(m, x):
    m.linear.W.array = m.linear.W.array * .9


def gradient(m, x):
    gx, = chainer.grad([F.sum(F.tanh(m.linear(x)))], [x], enable_double_backprop=True)
    return x if gx is None else gx


def without_kernels(m, x):
    with chainer.using_config('use_torch', 'never'):
        return F.tanh(x) + x


def watched(m, x):
    with chainer.function_hooks.TimerHook():
        return F.tanh(m.linear(x))


#: Things that a program may do with a matrix between two functions. It continues with the result,
#: if there is one.
EVENTS = (unchain, unchain_backward, cut_and_restore, overwrite, replace, copied, deeply, read,
          variable_of_node, constant, no_backprop, change_parameter, replace_parameter, gradient,
          without_kernels, watched)

#: Ways to compute gradients.
BACKWARD = ('backward', 'twice', 'retain_grad', 'double', 'grad', 'several', 'scale', 'hook',
            'debug', 'accumulate', 'inputs', 'changed', 'no seed')


@dataclasses.dataclass(frozen=True)
class Graph:
    """A program: functions and events, each with the indices of two earlier results."""

    seed: int
    dtype: str
    steps: tuple[tuple[str, int, int], ...]
    backward: str


@st.composite
def graphs(draw):
    names = [*FUNCTIONS, *FUNCTIONS, *[event.__name__ for event in EVENTS]]
    number = st.integers(0, 3)
    return Graph(
        draw(st.integers(0, 10**6)), draw(st.sampled_from('fdd')),
        tuple(draw(st.lists(st.tuples(st.sampled_from(names), number, number), min_size=1,
                            max_size=12))),
        draw(st.sampled_from(BACKWARD)))


class Model(chainer.Chain):
    def __init__(self, draw, dtype):
        super().__init__()
        with self.init_scope():
            self.linear = L.Linear(COLUMNS, COLUMNS, initialW=draw(COLUMNS, COLUMNS))
            self.norm = L.BatchNormalization(COLUMNS, dtype=dtype)
            self.convolution = L.Convolution2D(
                ROWS, ROWS, 2, pad=1, initialW=draw(ROWS, ROWS, 2, 2))
            self.b = chainer.Parameter(draw(COLUMNS))


def run(graph):
    """Return all arrays that a program can see."""
    random = np.random.RandomState(graph.seed)
    np.random.seed(graph.seed)

    def draw(*shape):
        return random.randn(*shape).astype(graph.dtype)

    with chainer.using_config('dtype', np.dtype(graph.dtype)):
        model = Model(draw, graph.dtype)
    inputs = [Variable(draw(ROWS, COLUMNS)), Variable(draw(ROWS, COLUMNS), requires_grad=False)]
    results = [*inputs, F.tanh(inputs[0])]
    events = {event.__name__: event for event in EVENTS}
    for name, i, j in graph.steps:
        x, y = (results[-1 - k % len(results)] for k in (i, j))
        if name in FUNCTIONS:
            results.append(FUNCTIONS[name](model, x, y))
        else:
            result = events[name](model, x)
            if result is not None:
                results.append(result)
    weights = [draw(ROWS, COLUMNS) for _ in range(4)]
    loss = sum(F.sum(x * w) for x, w in zip(results[:-5:-1], weights, strict=False))
    found = {f'result {n}': x.array.copy() for n, x in enumerate(results)}
    differentiate(graph, model, inputs, results, loss)
    found['loss'] = loss.array
    for name, param in model.namedparams():
        found[name] = param.array.copy()
        found[f'gradient of {name}'] = param.grad
    for n, x in enumerate(results):
        found[f'gradient {n}'] = x.grad
    found['mean'], found['var'] = model.norm.avg_mean, model.norm.avg_var
    return found


def differentiate(graph, model, inputs, results, loss):
    way = graph.backward
    model.cleargrads()
    if way == 'grad':
        wanted = [*inputs[:1], *model.params(include_uninit=False)]
        for x, g in zip(wanted, chainer.grad([loss], wanted), strict=True):
            x.grad_var = g
        return
    if way == 'double':
        loss.backward(enable_double_backprop=True)
        grads = [x.grad_var for x in [inputs[0], model.linear.W] if x.grad_var is not None]
        model.cleargrads()
        inputs[0].cleargrad()
        if grads:
            sum(F.sum(g ** 2) for g in grads).backward()
        return
    if way == 'several':
        outputs = [x for x in results[:-4:-1] if x.creator is not None]
        for y in {id(y): y for y in outputs}.values():
            y.grad = np.cos(np.arange(y.size, dtype=y.dtype)).reshape(y.shape)
        chainer.backward([*{id(y): y for y in outputs}.values()])
        return
    if way == 'no seed':
        results[-1].backward()
        return
    if way == 'changed':
        results[-1].unchain()
    if way in ('accumulate', 'inputs'):
        for x in model.params() if way == 'accumulate' else inputs[:1]:
            x.grad = np.ones_like(x.array)
    watching = {'hook': chainer.function_hooks.TimerHook(),
                'debug': chainer.using_config('debug', True)}
    with watching.get(way, contextlib.nullcontext()):
        loss.backward(retain_grad=way == 'retain_grad',
                      loss_scale=8. if way == 'scale' else None)
    if way == 'twice':
        loss.backward()


def losing(take):
    """A fault: the last gradient of a node replaces the others."""
    def changed(self, node):
        take(self, node)
    return changed


torch = pytest.importorskip('torch')
from chainer_compat.pytorch import recording, runs  # noqa: E402, F401

pytestmark = [pytest.mark.mpi_skip,
              pytest.mark.filterwarnings('ignore:A batch with no more than one sample')]


@law(graphs(), planted(runs._Gradients, 'take', losing), examples=60)
def test_runs(program):
    """Gradients that PyTorch computes for several functions at once match Chainer's."""
    try:
        with chainer.using_config('use_torch', 'never'):
            expected = run(program)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:  # Chainer's own
        with pytest.raises(type(error)):
            run(program)
        return
    found = run(program)
    assert found.keys() == expected.keys()
    tolerance = TOLERANCES[program.dtype]
    for name, b in expected.items():
        a = found[name]
        assert (a is None) == (b is None), name
        if a is not None:
            assert (a.dtype, a.shape) == (b.dtype, b.shape), name
            scale = np.abs(b).max(initial=1, where=np.isfinite(b))
            np.testing.assert_allclose(a, b, tolerance, tolerance * scale, err_msg=name)
