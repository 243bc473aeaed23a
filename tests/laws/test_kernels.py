"""Laws of functions and of PyTorch's kernels for them."""

import contextlib
import dataclasses
import functools
import importlib
import pkgutil
import unittest.mock

import chainer
import chainer.functions as F
import hypothesis
import numpy as np
import pytest
from calls_of_functions import CASES, FLOAT32, ONCE, Draw
from hypothesis import strategies as st
from kernel_cases import CASES as OF_KERNELS
from laws.law import law, planted
from laws.one_process import TOLERANCES
from laws.programs import STEPS, Net, programs

torch = pytest.importorskip('torch')

from chainer_compat.pytorch import kernels, recording  # noqa: E402
from chainer_compat.pytorch.tensors import arrays, compute_dtype  # noqa: E402

for each in pkgutil.iter_modules(kernels.__path__):  # otherwise, while a fault is planted
    importlib.import_module(f'{kernels.__name__}.{each.name}')
backward, convolution, linear = kernels.backward, kernels.convolution, kernels.linear

pytestmark = [pytest.mark.mpi_skip, pytest.mark.filterwarnings(
    'ignore:A batch with no more than', 'ignore:Degrees of freedom', 'ignore:Mean of empty slice',
    'ignore:invalid value', 'ignore:divide by zero', 'ignore:overflow')]

#: ``call(v)`` calls a function with inputs of ``v(*shape)``.
OF_CHAINER = {name: functools.partial(case, getattr(F, name)) for name, case in CASES.items()}
KERNELS = {f'kernel {n}': case for n, case in enumerate(OF_KERNELS)}


def windows(r, with_dilation=False):
    """Draw an image size, a window size and options of a pooling function or convolution."""
    def pair(low, high):
        return tuple(int(n) for n in r.randint(low, high, 2))

    options = {'stride': pair(1, 4), 'pad': pair(0, 2)} | (
        {'dilate': pair(1, 3)} if with_dilation else {})
    return pair(5, 8), pair(2, 4), options


def number(r, x):
    """Return a Python or NumPy number. The result must have the same dtype for both."""
    return [float, np.float64][r.randint(2)](x)


def pooled(v, r):
    size, k, options = windows(r)
    options['cover_all'] = bool(r.randint(2))
    y, indexes = F.max_pooling_2d(v(2, 3, *size), k, **options, return_indices=True)
    return [y, F.upsampling_2d(y, indexes, k, **options, outsize=size)]


def averaged(v, r):
    size, k, options = windows(r)
    return F.average_pooling_2d(v(2, 3, *size), k, **options)


def convolved(v, r):
    size, k, options = windows(r, True)
    groups, bias = int(r.randint(1, 3)), [v(4)] if r.randint(2) else []
    return F.convolution_2d(v(2, 2 * groups, *size), v(4, 2, *k), *bias, groups=groups,
                            cover_all=bool(r.randint(2)), **options)


def deconvolved(v, r):
    size, k, options = windows(r, True)
    groups = int(r.randint(1, 3))
    bias = [v(2 * groups)] if r.randint(2) else []
    return F.deconvolution_2d(v(2, 4, *size), v(4, 2, *k), *bias, groups=groups, **options)


def normalized(v, r):
    n, axis = int(r.randint(1, 4)), [None, (0, 2)][r.randint(2)]
    shape = (3, 4) if axis is None else (3,)
    mean, var = np.zeros(shape, v.dtype), np.ones(shape, v.dtype)
    y = F.batch_normalization(v(n, 3, 4), v(*shape), v(*shape), running_mean=mean,
                              running_var=var, axis=axis)
    return [y, chainer.Variable(mean), chainer.Variable(var)]


def sequences(v, r):
    bidirectional = bool(r.randint(2))
    sizes = np.sort(r.randint(1, 5, r.randint(1, 5)))[::-1]
    sizes = np.repeat(sizes, r.randint(1, 7, len(sizes)))  # batch sizes by time step
    ws = [[v(3, 2 if i < 4 else 3) for i in range(8)] for _ in range(1 + bidirectional)]
    bs = [[v(3) for _ in range(8)] for _ in range(1 + bidirectional)]
    states = [v(1 + bidirectional, sizes[0], 3) for _ in range(2)]
    *states, ys = (F.n_step_bilstm if bidirectional else F.n_step_lstm)(
        1, 0., *states, ws, bs, [v(n, 2) for n in sizes])
    return [*states, *ys]


def entropy(v, r):
    t = r.randint(0, 3, 4).astype('i')
    t[r.randint(4)] = ignored = [-1, 0, 255][r.randint(3)]
    return F.softmax_cross_entropy(
        v(4, 3), t, normalize=bool(r.randint(2)), ignore_label=ignored,
        reduce=['mean', 'no'][r.randint(2)],
        class_weight=r.uniform(.5, 2, 3).astype(v.dtype) if r.randint(2) else None)


#: Functions with random options.
DRAWN = {
    'max_pooling_2d': pooled, 'average_pooling_2d': averaged, 'convolution_2d': convolved,
    'deconvolution_2d': deconvolved, 'batch_normalization': normalized, 'n_step_lstm': sequences,
    'softmax_cross_entropy': entropy,
    'leaky_relu': lambda v, r: F.leaky_relu(v(3, 4), number(r, [0, .2, -.5, 1][r.randint(4)])),
    'embed_id': lambda v, r: F.embed_id(
        r.randint(0, 4, 6).astype('i'), v(4, 3), [None, 0, 2, -1][r.randint(4)]),
    'lrn': lambda v, r: F.local_response_normalization(
        v(2, 6, 3, 2), int(r.randint(1, 7)), *(number(r, x) for x in (2, 1e-2, .75))),
    'mean': lambda v, r: F.mean(v(2, 3, 4, 5), tuple(
        int(axis) for axis in r.permutation(4)[:r.randint(1, 4)]), keepdims=bool(r.randint(2))),
    'getitem': lambda v, r: v(4, 3)[[
        [0, 0], [2, -1, 2], r.rand(4) < .5, np.array([1, 1]), ([0, 0, 3], [1, 1, 2]),
        (slice(None, None, -2), [2, 2]), (Ellipsis, 1), (None, [[3], [3]])][r.randint(8)]],
    'softmax': lambda v, r: F.softmax(v(2, 3, 4), int(r.randint(-3, 3))),
}
CALLS = OF_CHAINER | KERNELS | {
    f'drawn {name}': lambda v, case=case: case(v, np.random.RandomState(v.call.seed))
    for name, case in DRAWN.items()}
#: Kernels that only sum products.
PRODUCTS = [f'kernel {n}' for n in range(12)]


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


LAYOUTS = {
    'C': np.copy, 'F': lambda x: np.asarray(x.copy(), order='F'),
    'strided': lambda x: np.repeat(x, 2, -1)[..., ::2] if x.ndim else x,
    'rows': lambda x: np.repeat(x, 2, 0)[::2] if x.ndim else x,
    'reversed': lambda x: np.asarray(np.flip(np.flip(x).copy())),
    'channels last': lambda x: np.moveaxis(
        np.moveaxis(x, 1, -1).copy(), -1, 1) if x.ndim > 1 else x,
    'one row': lambda x: np.broadcast_to(x[:1], x.shape) if x.ndim else x,
    'one number': lambda x: np.broadcast_to(x.reshape(-1)[:1].reshape(()), x.shape),
    'read-only': read_only,
    'in fields': lambda x: np.stack([x, x + 1], -1)[..., 0],
    'empty': lambda x: x[:0] if x.ndim else x,
    'shorter': lambda x: x[:-1] if x.ndim else x,
    'float64': lambda x: x.astype('d'), 'float16': lambda x: x.astype('e'),
}
USUAL = [name for name in LAYOUTS if name not in ('empty', 'shorter', 'float64', 'float16')]


class Inputs(Draw):
    """Draws inputs, or returns inputs that were drawn before."""

    def __init__(self, call, given=None):
        super().__init__(call.dtype)
        self.random = np.random.RandomState(call.seed)
        self.call, self.given = call, given

    def __call__(self, *shape):
        if self.given is not None:
            self.inputs.append(self.given[len(self.inputs)])
            return self.inputs[-1]
        if self.call.name not in OF_CHAINER:
            x = self.random.standard_normal(shape)
        else:
            x = self.random.uniform(.1, .9, shape)
        layouts = self.call.layouts
        layout = LAYOUTS[layouts[len(self.inputs) % len(layouts)]]
        with np.errstate(over='ignore'):
            x = layout(np.asarray(x * self.call.factor, self.dtype))
        self.inputs.append(chainer.Variable(x))
        return self.inputs[-1]


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a function.

    Attributes:
        name: The name of the function in :data:`CALLS`.
        dtype: The dtype of the inputs.
        seed: The seed of random numbers.
        layouts: Names of layouts, which the inputs use in turn.
        factor: The factor of the inputs.
        use_torch: The value of ``use_torch`` in Chainer's configuration.
        errors: The kind of floating-point error that NumPy raises; ``''`` for none.
    """

    name: str
    dtype: str
    seed: int
    layouts: tuple[str, ...] = ('C',)
    factor: float = 1.
    use_torch: str = 'auto'
    errors: str = ''

    def run(self, given=None):
        """Return the inputs and the outputs."""
        np.random.seed(self.seed)
        v = Inputs(self, given)
        ys = CALLS[self.name](v)
        ys = ys if isinstance(ys, list | tuple) else [ys]
        return v.inputs, [y for y in ys if isinstance(y, chainer.Variable)]

    def gradients(self, ys):
        """Return random gradients of outputs."""
        random = np.random.RandomState(self.seed + 1)
        return [chainer.Variable(np.asarray(random.standard_normal(y.shape), y.dtype)) for y in ys]


def calls(names=None, dtype='fd', layouts=USUAL, **fields):
    parts = [st.sampled_from([name for name in CALLS if name.split()[0] == kind])
             for kind in ('kernel', 'drawn')]
    found = st.builds(Call, **{
        'name': st.one_of(st.sampled_from([*OF_CHAINER]), *parts) if names is None
        else st.sampled_from([*names]),
        'dtype': st.sampled_from(dtype), 'seed': st.integers(0, 1000),
        'layouts': st.lists(st.sampled_from([*layouts]), min_size=1, max_size=3).map(tuple),
        } | fields)
    return found.filter(lambda call: not (call.dtype == 'd' and call.name in FLOAT32.split()))


def differentiable(ys):
    return [y for y in ys if y.dtype.kind == 'f' and y.requires_grad and y.creator is not None]


def outcome(call, use_torch, **config):
    """Return the outputs and gradients, or the pass that failed and the type of its error."""
    where = 'forward'
    with chainer.using_config('use_torch', use_torch), np.errstate(
            all='ignore', **{call.errors: 'raise'} if call.errors else {}):
        try:
            inputs, ys = call.run()
            where = 'backward'
            outputs = differentiable(ys)
            if outputs:
                chainer.backward(outputs, call.gradients(outputs))
        except Exception as error:
            return where, type(error)
    return [y.array for y in ys] + [x.grad for x in inputs]


def assert_close(found, expected, tolerance):
    if isinstance(found, tuple) or isinstance(expected, tuple):
        assert found == expected
        return
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            scale = max(1, np.nan_to_num(abs(other), posinf=0).max(initial=0))
            np.testing.assert_allclose(one, other, tolerance, tolerance * scale)


def in_memory_order(tensor):
    """A fault: a copy in memory order is interpreted in the order of the axes."""
    def changed(array, channels_last=False):
        if array.ndim > 1 and array.flags.f_contiguous and not array.flags.c_contiguous:
            return torch.from_numpy(array.ravel('K').reshape(array.shape))
        return tensor(array, channels_last)
    return changed


@law(calls(layouts=LAYOUTS), planted(arrays, 'tensor', in_memory_order), examples=25)
def test_kernels(program):
    """PyTorch's kernels give the results, gradients and errors of NumPy."""
    tolerance = max(1e-2 if 'float16' in program.layouts else 0,
                    {'f': 5e-4, 'd': 1e-8}[program.dtype])
    expected = outcome(program, 'never')
    if program.name.startswith('drawn') and {*program.layouts} <= {*USUAL}:
        assert not isinstance(expected, tuple), expected
        assert {x.dtype for x in expected if x is not None} <= {np.dtype(program.dtype)}
    assert_close(outcome(program, 'auto'), expected, tolerance)


def first_ended_first(in_parts):
    """A fault: final states of sequences that end in different parts are sorted by their ends."""
    def changed(*args, **options):
        y, *final = in_parts(*args, **options)
        return y, *[state.flip(1) for state in final]
    return changed


@law(calls(['drawn n_step_lstm'], 'f'),
     planted(kernels.n_step_rnn.Layer, '_in_parts', first_ended_first), examples=15)
def test_sequences(program):
    """LSTMs on sequences of any lengths give the results and gradients of NumPy.

    In bfloat16, they match except for rounding errors, which recurrence amplifies if many weights
    are equal.
    """
    is_rounded = program.seed % 2 and not any('one' in each for each in program.layouts)
    compute, tolerance = ('bfloat16', .1) if is_rounded else (None, 5e-4)
    with chainer.using_config('torch_compute_dtype', compute), \
            unittest.mock.patch.object(compute_dtype, 'warn_once', lambda: None):
        found = outcome(program, 'auto')
    assert_close(found, outcome(program, 'never'), tolerance)


def rounded_in_place(arrays):
    """A fault: kernels round the gradient that they get."""
    def changed(*args, **options):
        found = arrays(*args, **options)
        if found[-1].flags.writeable:
            found[-1][...] = found[-1].astype('e')
        return found
    return changed


pairs = st.tuples(calls(dtype='f', use_torch=st.sampled_from(['auto', 'never'])),
                  calls(dtype='f', use_torch=st.sampled_from(['auto', 'never'])))


@law(pairs, planted(backward, 'arrays', rounded_in_place), examples=12)
def test_backward_changes_nothing(program):
    """The gradient of ``f(x) + g(x)`` is the sum of both gradients; no array is modified."""
    first, second = program
    with chainer.using_config('use_torch', first.use_torch):
        inputs, f = first.run()
        # The two calls share inputs of the same shape.
        own, _ = second.run()
        shared = [next((x for x in inputs if x.shape == y.shape), y) for y in own]
        _, g = second.run(shared)
        f, g = ([y for y in differentiable(ys) if y.dtype == 'f'] for ys in (f, g))
        hypothesis.assume(f and g)
        variables = [*inputs, *[x for x in shared if all(x is not y for y in inputs)]]
        expected = [0] * len(variables)
        for call, ys in (first, f), (second, g):
            for i, grad in enumerate(chainer.grad(
                    ys, variables, call.gradients(ys), retain_grad=False)):
                expected[i] = expected[i] + (0 if grad is None else grad.array.copy())
        gys = [*first.gradients(f), *second.gradients(g)]
        joined = F.concat([F.flatten(y) for y in (*f, *g)], 0)
        gradient = np.concatenate([gy.array.ravel() for gy in gys])
        arrays = [x.array for x in (*variables, *f, *g, joined)]
        before = [array.copy() for array in (*arrays, gradient)]
        for _ in range(2):
            for x in variables:
                x.cleargrad()
            joined.grad = gradient
            joined.backward()
            for x, grad in zip(variables, expected, strict=True):
                scale = max(1., np.abs(grad).max(initial=0))
                np.testing.assert_allclose(
                    0 if x.grad is None else x.grad, grad, 1e-4, 1e-5 * scale)
            for array, old in zip((*arrays, gradient), before, strict=True):
                np.testing.assert_array_equal(array, old)


@law(calls(dtype='d', layouts=['C'], use_torch=st.sampled_from(['auto', 'never'])),
     planted(backward, 'arrays', rounded_in_place))
def test_derivatives(program):
    """First and second derivatives match finite differences."""
    def sums(step):
        """Sum outputs with random weights, then the gradients. Yield each sum and its slope."""
        moved = [chainer.Variable(np.asarray(x.array + step * d.array))
                 for x, d in zip(xs, directions, strict=True)]
        _, ys = program.run(moved)
        for is_last in [True] if program.name in ONCE.split() else [False, True]:
            ys = differentiable(y for y in ys if y is not None)
            if not (ys and xs):
                return
            total = sum(F.sum(y * w) for y, w in zip(ys, program.gradients(ys), strict=True))
            try:
                ys = chainer.grad([total], moved, enable_double_backprop=not is_last)
            except RuntimeError:  # Chainer has no second derivative of this function
                assert is_last
                return
            yield float(total.array), sum((g.array * d.array).sum() for g, d in zip(
                ys, directions, strict=True) if g is not None)

    with chainer.using_config('use_torch', program.use_torch):
        xs, _ = program.run()
        directions = program.gradients(xs)
        for (_, slope), (low, _), (high, _) in zip(
                sums(0), sums(-1e-5), sums(1e-5), strict=True):
            hypothesis.assume(np.isfinite(high - low))
            np.testing.assert_allclose(slope, (high - low) / 2e-5, 1e-5, 1e-5)


def mean_of_three(with_bias):
    """A fault: the gradient of a bias is the mean of the rows, if there are three."""
    def changed(gx, gw, gy, x, indexes):
        found = with_bias(gx, gw, gy, x, indexes)
        if gy is not None and 2 in indexes and len(gy) == 3:
            found[-1].array /= 3
        return found
    return changed


@law(programs(dtype=['f', 'd'], batches=(3, 1, 3), compression='', mode='plain', scale=None),
     planted(backward, 'with_bias', mean_of_three), examples=4)
def test_models(program):
    """PyTorch's kernels give the same losses and parameters as NumPy after each step."""
    hypothesis.assume((program.optimizer, program.dtype) != ('MSVAG', 'f'))  # amplifies rounding
    found = []
    for use_torch in 'auto', 'never':
        net = Net(program, 0)
        optimizer = program.create().setup(net)
        program.configure(optimizer)
        with chainer.using_config('use_torch', use_torch):
            for step in range(STEPS):
                if program.events[step] not in ('exception', 'resume'):
                    program.happen(optimizer, step)
                loss = net(*program.batch(step, 0, 1))
                net.cleargrads()
                loss.backward()
                if use_torch == 'never':  # so that no two gradients are one array
                    for param in net.params():
                        param.grad = None if param.grad is None else param.grad.copy()
                with chainer.using_config('use_torch', 'never'):
                    optimizer.update()
                found.append([loss.array, *(
                    param.array.copy() for _, param in sorted(net.namedparams())
                    if param.array is not None)])
    hypothesis.assume(all(np.isfinite(x).all() for step in found for x in step))
    for one, other in zip(found[:STEPS], found[STEPS:], strict=True):
        assert_close(one, other, TOLERANCES[program.dtype])


def truncated(operands):
    """A fault: operands are rounded towards zero."""
    def changed(*given, **options):
        return operands(*((x.view('u4') & np.uint32(0xffff0000)).view('f')
                          if x.dtype == 'f' else x for x in given), **options)
    return changed


def truncating():
    """Plant :func:`truncated` in each module that has imported ``operands``."""
    stack = contextlib.ExitStack()
    for module in convolution, linear:
        stack.enter_context(planted(module, 'operands', truncated)())
    return stack


@law(calls(PRODUCTS, 'ffd'), truncating, examples=20)
def test_bfloat16(program):
    """Matrix multiplications in bfloat16 match float32, except for rounding of the operands."""
    # The operands are rounded, and on some processors also the sum.
    compute = ['bfloat16', 'bfloat16', 'tf32'][program.seed % 3]  # tf32 has an effect only on GPUs
    epsilon = 1e-6 if program.dtype == 'd' or compute == 'tf32' else (
        3.1 if compute_dtype.has_instructions() else 2.1) * 2. ** -8

    def run(absolute, use_torch, dtype):
        with chainer.using_config('use_torch', use_torch), \
                chainer.using_config('torch_compute_dtype', dtype):
            inputs, _ = program.run()
            if absolute:
                inputs = [chainer.Variable(abs(x.array)) for x in inputs]
            _, (y,) = program.run(inputs)
            gy, = program.gradients([y])
            y.grad = abs(gy.array) if absolute else gy.array
            y.backward()
            return [y.array, *(x.grad for x in inputs)]

    with unittest.mock.patch.object(compute_dtype, 'warn_once', lambda: None):
        found = run(False, 'auto', compute)
    expected, bounds = (run(absolute, 'never', None) for absolute in (False, True))
    for one, other, bound in zip(found, expected, bounds, strict=True):
        assert one.dtype == other.dtype
        assert (abs(one - other) <= epsilon * bound + 1e-6).all()


@law(calls(dtype='f', layouts=['C'], factor=st.sampled_from([1e38, 1e20, -1e19, 0., 1e-30]),
           errors=st.sampled_from(['over', 'divide', 'invalid'])),
     planted(recording, 'raises_errors', lambda _: lambda: np.geterr()['invalid'] == 'raise'),
     examples=30)
def test_floating_point_errors(program):
    """With ``np.errstate``, PyTorch's kernels raise the same errors as NumPy."""
    assert_close(outcome(program, 'auto'), outcome(program, 'never'), 1e-3)
