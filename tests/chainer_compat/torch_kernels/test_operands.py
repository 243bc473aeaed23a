"""Every kernel, with each operand in every layout of memory, against Chainer's NumPy code.

Functions are called once, and record the calls of all kernels in the table. Then each call is
repeated, with one operand at a time in another layout; Chainer's own function gets contiguous
copies in float64.
"""

import copy
import functools
import importlib

import chainer
import chainer.functions as F
import numpy as np
import pytest
from kernel_cases import CASES, ONCE, Inputs, draw

from chainer_compat.torch_kernels import KERNELS, OF_IMAGES
from chainermn.functions import _batch_norm_on_host as on_host

pytest.importorskip('torch')

pytestmark = pytest.mark.mpi_skip

TOLERANCE = {'e': 2e-2, 'f': 2e-4, 'd': 1e-9}


def misaligned(x):
    """Return a copy that starts at an odd address."""
    buffer = np.empty(x.nbytes + 1, np.uint8)[1:]
    result = np.ndarray(x.shape, x.dtype, buffer)
    result[...] = x
    return result


def in_fields(x):
    fields = np.zeros(x.shape, [('flag', 'b'), ('value', x.dtype)])
    fields['value'] = x
    return fields['value']


def read_only(x):
    result = x.copy()
    result.flags.writeable = False
    return result


#: Some of them repeat elements.
LAYOUTS = {
    'contiguous': np.copy,
    'every second element': lambda x: np.repeat(x, 2, axis=-1)[..., ::2] if x.ndim else x.copy(),
    'every second row': lambda x: np.repeat(x, 2, axis=0)[::2] if x.ndim else x.copy(),
    'a column': lambda x: np.stack([x, x + 1], axis=-1)[..., 0],
    'reversed': lambda x: np.flip(np.flip(x).copy()),
    'reversed rows': lambda x: x[::-1].copy()[::-1] if x.ndim else x.copy(),
    'Fortran': lambda x: np.asfortranarray(x) if x.ndim else x.copy(),
    'channels last': lambda x: np.moveaxis(
        np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1) if x.ndim > 1 else x.copy(),
    'swapped batch': lambda x: x.swapaxes(0, 1).copy().swapaxes(0, 1) if x.ndim > 1 else x.copy(),
    'one number': lambda x: np.broadcast_to(x.ravel()[:1].reshape(()), x.shape),
    'one row': lambda x: np.broadcast_to(x[:1], x.shape) if x.ndim else x.copy(),
    'one writable row': lambda x: np.lib.stride_tricks.as_strided(
        x[:1].copy(), x.shape, (0, *x.strides[1:])) if x.ndim and x.size else x.copy(),
    'strides without meaning': lambda x: np.lib.stride_tricks.as_strided(
        x.copy(), x.shape, [-3 if n == 1 else s for n, s in zip(x.shape, x.strides, strict=True)]),
    'read-only': read_only,
    'misaligned': misaligned,
    'in fields': in_fields,
    'inside a buffer': lambda x: np.frombuffer(
        bytearray(b'12345678' + x.tobytes()), x.dtype, offset=8).reshape(x.shape),
    'bytes': lambda x: np.frombuffer(x.tobytes() or b'', x.dtype).reshape(x.shape)
        if x.size else x.copy(),
    'foreign byte order': lambda x: x.astype(x.dtype.newbyteorder()),
    'float16': lambda x: x.astype('e'),
    'float32': lambda x: x.astype('f'),
    'float64': lambda x: x.astype('d'),
}


class Call:
    """A call of a function that has a kernel.

    Its operands are all arrays in its arguments, nested or not, and in the node that computes.
    """

    def __init__(self, name, function, args, kwargs):
        self.name, self.function = name, function
        self.args = snapshot([args, kwargs])

    def operands(self):
        found = []
        rebuild(self.args, lambda array: found.append(array) or array)
        return found

    def run(self, change, original=False, mode='auto'):
        """Call the function, or Chainer's, with operands changed by ``change(index, array)``.

        Returns:
            The arrays of its result, and the operands before and after.
        """
        given = []

        def changed(array):
            given.append(change(len(given), array))
            return given[-1]

        args, kwargs = rebuild(self.args, changed)
        before = [array.copy() for array in given]
        function = self.function.__wrapped__ if original else self.function
        np.random.seed(0)  # for dropout
        with chainer.using_config('use_torch', mode), np.errstate(all='ignore'):
            result = function(*args, **kwargs)
        arrays = flat(result)
        return arrays, before, given


def flat(result):
    """Return the arrays of a result, with None where one is left out."""
    if isinstance(result, list | tuple):
        return [array for item in result for array in flat(item)]
    return [getattr(result, 'array', result)]


def snapshot(value):
    return rebuild(value, np.copy)


def rebuild(value, change):
    """Copy nested arguments; each floating-point array is what ``change`` returns for it."""
    if isinstance(value, np.ndarray):
        return change(value) if value.dtype.kind == 'f' else value
    if isinstance(value, chainer.Variable):
        return chainer.Variable(rebuild(value.array, change))
    if isinstance(value, list | tuple):
        return type(value)([rebuild(item, change) for item in value])
    if isinstance(value, dict):
        return {key: rebuild(item, change) for key, item in value.items()}
    if isinstance(value, chainer.Link):
        copied = value.copy('copy')
        for param in copied.params():
            param.array = rebuild(param.array, change)
        return copied
    if isinstance(value, chainer.FunctionNode):
        copied = copy.copy(value)
        vars(copied).update({key: rebuild(item, change) for key, item in vars(value).items()
                             if isinstance(item, np.ndarray | chainer.FunctionNode)})
        return copied
    return value


@pytest.fixture(scope='module')
def calls():
    """Return the calls of all kernels, by dtype."""
    found = {'f': {}, 'd': {}}
    with pytest.MonkeyPatch.context() as patch:
        for module_name, functions in (KERNELS | OF_IMAGES).items():
            module = importlib.import_module(module_name)
            for name in functions:
                *path, attribute = name.split('.')
                owner = functools.reduce(getattr, path, module)
                patch.setattr(owner, attribute, recorder(
                    f'{module_name}.{name}', getattr(owner, attribute), found))
        for dtype in found:
            for case in CASES:
                v = Inputs(dtype)
                ys = case(v)
                ys = ys if isinstance(ys, list | tuple) else [ys]
                loss = sum(F.sum(F.sin(y)) for y in ys)
                loss.backward()
                if case not in ONCE:
                    first = chainer.grad([loss], v.drawn, enable_double_backprop=True)
                    squares = sum(F.sum(g * g) for g in first if g is not None)
                    chainer.grad([squares], v.drawn)
    return {dtype: [*calls.values(), *parts(dtype)] for dtype, calls in found.items()}


def recorder(name, function, found):
    @functools.wraps(function)
    def record(*args, **kwargs):
        operands = []
        rebuild([args, kwargs], lambda array: operands.append(array) or array)
        if operands:
            calls = found[operands[-1].dtype.char]
            # The same call again, such as of another layer, shows nothing new.
            calls.setdefault((name, *(array.shape for array in operands)),
                             Call(name, function, args, kwargs))
        return function(*args, **kwargs)

    return record


def parts(dtype):
    """Return calls of the parts of multi-node batch normalization."""
    for shape, axis in ((4, 3, 2), (0, 2)), ((4, 3), (0,)):
        x, gy = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
        mean, inv_std, gamma = (abs(draw(3, dtype=dtype, seed=i)) + .5 for i in (2, 3, 4))
        expander = tuple(None if i in axis else slice(None) for i in range(len(shape)))
        sums, total = draw(2, 3, dtype=dtype), np.array(100, dtype)
        kind = np.dtype(dtype)
        for function, args in [
            (on_host.statistics, (x, axis, expander, kind)),
            (on_host.gradient_sums, (gy, x, axis, expander, mean, inv_std, kind)),
            (on_host.input_gradient, (gy, x, expander, mean, inv_std, gamma, sums, total)),
        ]:
            yield Call(function.__name__, function, args, {})


def wide(call):
    """Return a copy of the call for float64."""
    result = copy.copy(call)
    result.args = rebuild(call.args, lambda array: array.astype('d'))

    def widened(value):
        if isinstance(value, np.dtype) and value.kind == 'f':
            return np.dtype('d')
        if isinstance(value, chainer.FunctionNode):
            vars(value).update({key: widened(item) for key, item in vars(value).items()})
        return value

    args, kwargs = result.args
    result.args = [type(args)(widened(arg) for arg in args), kwargs]
    return result


def test_all_kernels_are_called(calls):
    names = {f'{module}.{name}' for module, functions in (KERNELS | OF_IMAGES).items()
             for name in functions if '_gpu_' not in name}
    for dtype in 'fd':
        assert names - {call.name for call in calls[dtype]} == set()


@pytest.mark.parametrize('layout', LAYOUTS)
def test_layouts_of_operands(calls, layout):
    for dtype in 'fd':
        for call in calls[dtype]:
            for i in range(len(call.operands())):
                compare(call, i, lambda at, array, i=i: (
                    LAYOUTS[layout](array) if at == i else array.copy()))


def compare(call, index, change):
    """Compare a call whose operands are changed."""
    where = f'{call.name}, operand {index} of {[a.shape for a in call.operands()]}'
    try:
        narrow, _, changed = call.run(change, mode='never')
    except Exception as error:  # such as an operand of another dtype
        with pytest.raises(type(error)):
            call.run(change)
        return
    expected = wide(call).run(lambda i, array: change(i, array).astype('d', order='C'), True)
    if any(0 in array.strides and (before != after).any()
           for array, before, after in zip(changed, *expected[1:], strict=True)):
        return  # results in memory that overlaps are not defined
    found, before, after = call.run(change)
    worst = max((array.dtype.char for array in [*after, *narrow] if array is not None),
                key=TOLERANCE.get)
    assert len(found) == len(narrow) == len(expected[0]), where
    for a, b, exact in zip(found, narrow, expected[0], strict=True):
        if a is None:  # a variance that nothing uses
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        tolerance = TOLERANCE[worst]
        np.testing.assert_allclose(
            a, exact, rtol=tolerance, atol=tolerance * max(1, abs(exact).max(initial=0)),
            err_msg=where)
    # Operands change where Chainer changes them, and results do not share their memory.
    for a, b, exact, end in zip(before, after, expected[1], expected[2], strict=True):
        if (exact == end).all():
            np.testing.assert_array_equal(a, b, err_msg=where)
        else:
            np.testing.assert_allclose(b, end, rtol=TOLERANCE[worst], atol=TOLERANCE[worst])
    assert_separate([a for a in found if a is not None], after, where)


def assert_separate(found, operands, where):
    for i, a in enumerate(found):
        assert a.flags.writeable, where
        for other in operands:
            if other is not a:  # running statistics are results, too
                assert not np.shares_memory(a, other), where
        for other in found[:i]:
            assert not np.shares_memory(a, other), where


#: Operands for which docs/torch_kernels.md says that results differ, and those that are internal.
DIFFERENT = {
    ('Convolution2DFunction._forward_cpu_core', 1): 'padding times the weight',
    ('Convolution2DGradW._forward_cpu_core', 1): 'padding times the gradient',
    ('GeneralBatchNormalizationImpl.forward', 0): 'infinite gamma',
    ('BatchNormalization.forward', 1): 'infinite gamma',
    ('BatchNormalization.forward', 3): 'infinite gamma, with running statistics',
    ('GeneralBatchNormalizationImpl.backward', 4): 'inverse standard deviation',
    ('_SoftmaxGrad.forward', 0): 'softmax, which is at most 1',
    ('input_gradient', 3): 'mean', ('input_gradient', 4): 'inverse standard deviation',
    ('gradient_sums', 3): 'inverse standard deviation', ('input_gradient', 6): 'count',
}


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf, -0., 'denormal'])
def test_special_values(calls, value):
    """As Chainer's NumPy code computes them."""
    for dtype in 'fd':
        number = np.finfo(dtype).tiny / 8 if value == 'denormal' else value
        for call in calls[dtype]:
            name = '.'.join(call.name.split('.')[-2:])
            for index, operand in enumerate(call.operands()):
                if (name, index) not in DIFFERENT:
                    for position in {0, operand.size // 2, operand.size - 1}:
                        compare_special(call, index, position, number)


def compare_special(call, index, position, number):
    def change(i, array):
        array = array.copy()
        if i == index:
            array.reshape(-1)[position] = number
        return array

    expected, found = (call.run(change, mode=mode)[0] for mode in ('never', 'auto'))
    for a, b in zip(found, expected, strict=True):
        if a is not None:
            tolerance = 10 * TOLERANCE[b.dtype.char]
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=(
                f'{call.name}, operand {index} of {[a.shape for a in call.operands()]}'))


def test_special_values_in_functions(calls):
    """Forward and backward, with several of them in one window."""
    nan, inf = np.nan, np.inf
    x = np.array([[1, nan, -2, nan], [nan, -1, inf, 0], [-inf, -inf, 3, -0.], [-inf, -inf, nan, 1]],
                 'f')[None, None]
    gy = np.array([[1, 2, nan, inf], [3, 4, -inf, 5], [nan, 6, 7, inf], [8, nan, 9, -1]],
                  'f')[None, None]
    for f in [F.relu, F.leaky_relu, lambda x: F.leaky_relu(x, 0), lambda x: F.leaky_relu(x, -.5),
              lambda x: F.max_pooling_2d(x, 2), lambda x: F.max_pooling_2d(x, 3, 1, 1),
              lambda x: F.average_pooling_2d(x, 2), F.log_softmax]:
        results = []
        for mode in 'never', 'auto':
            v = chainer.Variable(x)
            with chainer.using_config('use_torch', mode), np.errstate(all='ignore'):
                y = f(v)
                y.grad = gy[..., :y.shape[2], :y.shape[3]].copy()
                y.backward()
            results.append((y.array, v.grad))
        for a, b in zip(*results, strict=True):
            np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_layouts_of_all_operands(calls, request):
    """Several operands at a time, at random."""
    random = np.random.RandomState(0)
    layouts = [layout for name, layout in LAYOUTS.items() if not name.startswith('float')]
    each = [call for dtype in 'fd' for call in calls[dtype]]
    for _ in range(500 if request.config.getoption('full') else 40):
        call = each[random.randint(len(each))]
        chosen = [layouts[random.randint(len(layouts))] for _ in call.operands()]
        compare(call, None, lambda i, array, chosen=chosen: chosen[i](array))
