"""Functions build the graph that Chainer's own code builds, in less time.

The reference is Chainer's ``FunctionNode.apply``, which the patched one still has.
"""

import collections
import re
import weakref

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import FunctionNode, Parameter, Variable

pytestmark = pytest.mark.mpi_skip

APPLY, INIT = FunctionNode.apply, Variable.__init__


@pytest.fixture(autouse=True)
def without_volatile(monkeypatch):
    """A test of ``volatile`` in the same process replaces these for good."""
    monkeypatch.setattr(FunctionNode, 'apply', APPLY)
    monkeypatch.setattr(Variable, '__init__', INIT)


class Node(FunctionNode):
    """Adds its inputs, and returns the sum and its first input."""

    def __init__(self, outputs=None, kept_inputs=None, kept_outputs=None):
        self.outputs_of = outputs or (lambda xs: (sum(xs), xs[0].copy()))
        self.kept = kept_inputs, kept_outputs

    def check_type_forward(self, in_types):
        for each in in_types[1:]:
            chainer.utils.type_check.expect(each.shape == in_types[0].shape)

    def forward(self, inputs):
        for keep, indexes in zip((self.retain_inputs, self.retain_outputs), self.kept, strict=True):
            if indexes is not None:
                keep(indexes)
        return self.outputs_of(inputs)

    def backward(self, indexes, grad_outputs):
        gy = [g for g in grad_outputs if g is not None]
        return tuple(gy[0] * (2 + i) for i in indexes)


class Elementwise(Node):
    is_elementwise = True


class WithLayouts(Node):
    """Has a check of its own, which is called."""

    def check_layout_forward(self, inputs):
        if len(inputs) > 1:
            raise RuntimeError('my own check')


class SetsLayouts(Node):
    """Sets the layouts of its outputs, as convolutions do."""

    def __init__(self, layouts):
        super().__init__()
        self.output_layouts = layouts


class OldFunction(chainer.Function):
    def check_type_forward(self, in_types):
        chainer.utils.type_check.expect(in_types.size() == 2)

    def forward(self, inputs):
        return inputs[0] * inputs[1],

    def backward(self, inputs, grad_outputs):
        return inputs[1] * grad_outputs[0], inputs[0] * grad_outputs[0]


class Subclass(np.ndarray):
    pass


class MyVariable(Variable):
    pass


def values(n, *shape):
    return [np.random.RandomState(i).standard_normal(shape or (2, 3)).astype('f')
            for i in range(n)]


def mixed(*arrays):
    """One of each kind of input."""
    kinds = (Variable, np.asarray, Parameter, lambda x: Variable(x, requires_grad=False))
    return [kind(x) for kind, x in zip(kinds, arrays, strict=False)]


class Counts(Node):
    n = 0

    def check_layout_forward(self, inputs):
        self.n += 1


def fail(inputs):
    raise KeyError('mine')


def with_method(node, name, method):
    setattr(node, name, method)
    return node


def after_error(node):
    """Return the error of a call, and what it has left in the node."""
    return outcome(lambda: node.apply(values(1))), node, 'forward' in vars(node)


CALLS = {
    'variables': lambda: Node().apply(mixed(*values(4))),
    'arrays': lambda: Node().apply(values(2)),
    'without gradient': lambda: Node().apply([Variable(values(1)[0], requires_grad=False)]),
    'a tuple': lambda: Node().apply(tuple(values(2))),
    'retained': lambda: Node(None, (0, -1), (1,)).apply(mixed(*values(2))),
    'elementwise': lambda: Elementwise().apply(mixed(*values(2))),
    'own check of layouts': lambda: WithLayouts().apply(mixed(*values(1))),
    'own check of layouts fails': lambda: WithLayouts().apply(mixed(*values(2))),
    'sets layouts': lambda: SetsLayouts((None, None)).apply(mixed(*values(1))),
    'sets too few layouts': lambda: SetsLayouts((None,)).apply(mixed(*values(1))),
    'sets other layouts': lambda: SetsLayouts(
        (chainer.memory_layouts.CUDNN_CHANNEL_LAST_X, None)).apply(mixed(*values(1, 2, 3, 4, 5))),
    'no output': lambda: Node(lambda xs: ()).apply(mixed(*values(1))),
    'output None': lambda: Node(lambda xs: (xs[0], None)).apply(mixed(*values(1))),
    'a list of outputs': lambda: Node(lambda xs: [xs[0]]).apply(mixed(*values(1))),
    'a number': lambda: Node(lambda xs: (1.,)).apply(mixed(*values(1))),
    'a named tuple': lambda: Node(
        lambda xs: collections.namedtuple('Pair', 'a b')(xs[0], xs[0])).apply(mixed(*values(1))),
    'outputs of a subclass': lambda: Node(
        lambda xs: (xs[0].view(Subclass),), (0,), (0,)).apply(mixed(*values(1))),
    'elementwise with two shapes': lambda: Elementwise(
        lambda xs: (xs[0], xs[0][:1])).apply(mixed(*values(1))),
    'wrong types': lambda: Node().apply([*values(1), *values(1, 4)]),
    'no array': lambda: Node().apply([*values(1), 3.]),
    'None': lambda: Node().apply([*values(1), None]),
    'no inputs': lambda: Node(lambda xs: values(1)).apply(()),
    'an uninitialized parameter': lambda: Node().apply([Parameter()]),
    'a subclass of Variable': lambda: Node().apply([MyVariable(values(1)[0])]),
    'a subclass of arrays': lambda: Node().apply([values(1)[0].view(Subclass)]),
    'a layout': lambda: F.relu(Variable(*values(1, 2, 3, 4, 5)).as_layout(
        chainer.memory_layouts.CUDNN_CHANNEL_LAST_X)),
    'an old function': lambda: OldFunction()(*mixed(*values(2))),
    'an old function fails': lambda: OldFunction()(*values(1)),
    'twice': lambda: [node.apply(mixed(*values(2))) for node in [Node()] for _ in range(2)],
    'elementwise twice': lambda: [
        node.apply(mixed(*values(2))) for node in [Elementwise()] for _ in range(2)],
    'of another dtype': lambda: Node().apply([Variable(values(1)[0].astype('d'))]),
    'empty': lambda: Node().apply([Variable(values(1)[0][:0])]),
    'own check of an object': lambda: with_method(
        Node(), 'check_type_forward', fail).apply(values(1)),
    'forward fails': lambda: after_error(Node(fail)),
    'wrong outputs': lambda: after_error(Node(lambda xs: [xs[0]])),
    'wrong outputs of an object': lambda: after_error(
        with_method(Node(), 'forward', lambda xs: [xs[0]])),
    'wrong outputs after a check of layouts': lambda: after_error(Counts(lambda xs: [xs[0]])),
    'backward of backward': lambda: chainer.grad(chainer.grad(
        Node().apply(mixed(*values(1)))[:1], [], enable_double_backprop=True), []),
}

CONFIGURATIONS = [{}, {'enable_backprop': False}, {'type_check': False}, {'debug': True},
                  {'lazy_grad_sum': True}, {'enable_backprop': True, 'debug': False}]


def described(value, seen=None):
    """Describe a value with everything that belongs to it, so that two can be compared."""
    seen = {} if seen is None else seen
    if isinstance(value, weakref.ref):
        return 'weak', described(value(), seen)
    if isinstance(value, np.ndarray):
        return type(value), value.dtype, value.shape, value.tobytes(), seen.setdefault(
            id(value), len(seen))
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [described(each, seen) for each in value]
    if isinstance(value, dict):
        return {key: described(each, seen) for key, each in value.items()}
    if isinstance(value, (Variable, chainer.variable.VariableNode, FunctionNode, chainer.Function)):
        if id(value) in seen:
            return seen[id(value)]
        seen[id(value)] = len(seen)
        kept = {key: each for key, each in vars(value).items()
                if key not in ('outputs_of', 'stack')}
        return type(value), described(kept, seen)
    return re.sub(' at 0x[0-9a-f]+', '', repr(value))


def outcome(call):
    try:
        result = call()
    except Exception as error:
        return type(error), re.sub(' at 0x[0-9a-f]+', '', str(error))
    return described(result)


@pytest.mark.parametrize('options', CONFIGURATIONS, ids=str)
@pytest.mark.parametrize('name', CALLS)
def test_the_graph_of_chainer(monkeypatch, name, options):
    for key, value in options.items():
        monkeypatch.setattr(chainer.config, key, value, raising=False)
    found = outcome(CALLS[name])
    monkeypatch.setattr(FunctionNode, 'apply', FunctionNode.apply.__wrapped__)
    assert found == outcome(CALLS[name])


@pytest.mark.parametrize('name', ['variables', 'arrays', 'retained', 'elementwise',
                                  'without gradient', 'sets layouts'])
def test_ordinary_calls_do_not_run_the_original(monkeypatch, name):
    """Only Chainer's own code calls ``as_variable`` in ``apply``."""
    monkeypatch.setattr(chainer, 'as_variable', None)
    CALLS[name]()


@pytest.mark.parametrize('cls, name', [
    (Variable, '__init__'), (Variable, '_init_impl'), (chainer.variable.VariableNode, '__init__'),
    (FunctionNode, '_check_data_type_forward'), (FunctionNode, 'check_layout_forward'),
    (FunctionNode, 'check_type_forward')])
def test_methods_that_a_program_replaces(monkeypatch, cls, name):
    original, calls = getattr(cls, name), []

    def replaced(self, *args, **kwargs):
        calls.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(cls, name, replaced)
    F.identity(Variable(*values(1)))
    assert len(calls) >= 1 + (cls is not FunctionNode)


@pytest.mark.parametrize('debug', [False, True])
@pytest.mark.parametrize('name', ['concat', 'stack', 'hstack', 'vstack', 'dstack', 'pad_sequence'])
def test_the_rows_of_an_array_are_the_inputs(name, debug):
    """Chainer 7.8.1 raised an error, and lost the gradients of an iterator's elements."""
    function, x = getattr(F, name), np.arange(24, dtype='f').reshape(2, 3, 4)
    with chainer.using_config('debug', debug):
        expected = function(list(x))
        v = Variable(x)
        for rows in v, x, iter(x):
            y = function(rows)
            np.testing.assert_array_equal(y.array, expected.array)
        F.sum(function(v) * expected.array).backward()
    # Each element occurs once in the result, so its gradient is its value.
    np.testing.assert_array_equal(v.grad, x)
    rows = [Variable(row) for row in x]
    with chainer.using_config('debug', debug):
        F.sum(function(iter(rows)) * expected.array).backward()
    np.testing.assert_array_equal([row.grad for row in rows], x)


def test_backward_enters_no_device_on_the_host(monkeypatch):
    entered = []
    using_device = chainer.using_device

    def using(device):
        entered.append(device)
        return using_device(device)

    x = Variable(np.ones(3, 'f'))
    y = F.sum(F.sigmoid(x))
    y.grad = np.ones((), 'f')
    monkeypatch.setattr(chainer, 'using_device', using)
    y.backward()
    assert not entered
    assert x.grad is not None


def test_gradients_of_a_backward_within_backward():
    """F.forget adds to the gradients of parameters, which other functions use before it."""
    found = []
    for forget in (lambda f, x: f(x)), F.forget:
        np.random.seed(0)
        link = L.Linear(3, 3)
        y = forget(link, chainer.Variable(np.ones((2, 3), 'f')))
        F.sum(F.tanh(link(link(y)))).backward()
        found.append(link.W.grad)
    np.testing.assert_allclose(*found, rtol=1e-5)


class Answering:
    def __call__(self, x):
        return 'mixin'


class Mixed(chainer.Link, Answering):
    def forward(self, x):
        return 'forward'


class Plain(chainer.Link):
    def forward(self, x, factor=1):
        return x * factor


class NotInitialized(chainer.Link):
    def __init__(self):
        pass


def test_calls_of_links():
    assert Mixed()(1) == 'mixin'
    assert Plain()(2, factor=3) == 6
    with pytest.raises(RuntimeError, match='has not been called'):
        NotInitialized()(1)
    with pytest.raises(AttributeError, match='forward'):
        chainer.Link()(1)


@pytest.mark.parametrize('is_local', [True, False])
def test_hooks_of_links_are_called(is_local):
    class Hook(chainer.LinkHook):
        calls = 0

        def forward_preprocess(self, args):
            self.calls += 1

        forward_postprocess = forward_preprocess

    link, hook = Plain(), Hook()
    if is_local:
        link.add_hook(hook)
        link(1)
        link.delete_hook(hook.name)
    else:
        with hook:
            link(1)
    link(1)
    assert hook.calls == 2
