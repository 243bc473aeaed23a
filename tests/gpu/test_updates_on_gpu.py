"""Updates and hooks with one launch for many parameters: Chainer's bits, and NumPy's values."""

import itertools
import warnings

import chainer
import numpy as np
import pytest
from chainer import optimizer_hooks as hooks
from chainer import optimizers

from chainer_compat.updates import device_gradients, elementwise

pytestmark = [pytest.mark.gpu, pytest.mark.mpi_skip]

SHAPES = [(3, 4), (), (1,), (2 * elementwise.LENGTH + 5,), (5, 1, 2), (0, 3), (4, 4)]
OPTIMIZERS = {
    name: getattr(optimizers, name) for name in (
        'SGD', 'MomentumSGD', 'NesterovAG', 'CorrectedMomentumSGD', 'AdaGrad', 'AdaDelta',
        'RMSpropGraves', 'Adam', 'AMSGrad', 'AdaBound', 'AMSBound', 'MSVAG', 'SMORMS3')
} | {
    'RMSprop': lambda: optimizers.RMSprop(eps=1e-3),
    'AdamW': lambda: optimizers.AdamW(.01, weight_decay_rate=.1, eta=.5),
}
BY_THEMSELVES = {'MSVAG', 'SMORMS3'}
TOLERANCE = {'float16': 2e-2, 'float32': 1e-5, 'float64': 1e-12}


@pytest.fixture
def gpu(device):
    return chainer.get_device(f'@cupy:{device.id}')


def make(name, dtype, device):
    model = chainer.Link()
    random = np.random.RandomState(0)
    with model.init_scope():
        for i, shape in enumerate(SHAPES):
            setattr(model, f'p{i}', chainer.Parameter(random.normal(size=shape).astype(dtype)))
    model.to_device(device)
    return model, OPTIMIZERS[name]().setup(model)


def one_by_one(model, optimizer):
    for param in model.params():
        param.update_rule.unknown = None  # might change what the rule does


def set_gradients(model, step):
    for i, param in enumerate(model.params()):
        random = np.random.RandomState(100 * step + i)
        param.grad = param.device.send(random.normal(size=param.shape).astype(param.dtype))


def launches(call, is_virtual):
    """Call a function and return the number of launches; ``None`` on a real GPU."""
    if not is_virtual:
        call()
        return None
    from virtual_gpu.counters import counting

    with counting() as counted:
        call()
    return counted['launches']


def state_of(model):
    arrays = [x for param in model.params() for x in (
        param.array, param.grad, *(getattr(param.update_rule, 'state', None) or {}).values())
        if hasattr(x, 'dtype')]
    return [chainer.backends.cuda.to_cpu(x) for x in arrays]


def assert_same_bits(model, other):
    for x, y in zip(state_of(model), state_of(other), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize('dtype', TOLERANCE)
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_the_bits_of_chainer(gpu, is_virtual, name, dtype):
    (model, optimizer), (other, alone) = make(name, dtype, gpu), make(name, dtype, gpu)
    one_by_one(other, alone)
    for step in range(3):
        set_gradients(model, step)
        set_gradients(other, step)
        number = launches(optimizer.update, is_virtual)
        alone.update()
    assert_same_bits(model, other)
    if is_virtual and name not in BY_THEMSELVES:
        assert number == 1


HOOKS = {
    'decay': lambda: hooks.WeightDecay(.1),
    'clipping': lambda: hooks.GradientClipping(2.),
    'lasso': lambda: hooks.Lasso(.01),
    'hard clipping': lambda: hooks.GradientHardClipping(-.5, .5),
}


@pytest.mark.parametrize('scale', [None, 4., 'dynamic'])
@pytest.mark.parametrize('names', [(), *itertools.permutations(HOOKS, 1),
                                   *itertools.permutations(HOOKS, 2)], ids=' and '.join)
@pytest.mark.parametrize('dtype', ['float32', 'float64'])
def test_hooks_and_loss_scale(gpu, is_virtual, names, scale, dtype):
    results = []
    for device in gpu, chainer.get_device('@numpy'):
        model, optimizer = make('Adam', dtype, device)
        for hook in names:
            optimizer.add_hook(HOOKS[hook]())
        if scale == 'dynamic':
            optimizer.loss_scaling(interval=2, scale=None)
        elif scale:
            optimizer.set_loss_scale(scale)
        for step in range(4):
            set_gradients(model, step)
            if scale == 'dynamic' and step == 1:
                model.p4.grad[0] = np.inf
            for param in model.params():
                param._loss_scale = optimizer._loss_scale
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')  # of the gradient that is not finite
                number = launches(optimizer.update, is_virtual and device is gpu)
            if device is gpu and is_virtual and {*names} <= {'decay', 'clipping'}:
                assert number <= 1 + ('decay' in names) + 2 * ('clipping' in names) + (
                    scale == 'dynamic')
        results.append([*state_of(model), np.array(optimizer._loss_scale or 0)])
    for x, y in zip(*results, strict=True):
        np.testing.assert_allclose(x, y, TOLERANCE[dtype], TOLERANCE[dtype])


@pytest.mark.parametrize('dtype', ['float16', 'float32'])
def test_clipping_of_many_small_values(gpu, dtype):
    """Chainer's sum of squares overflows in float16, and all gradients become zero."""
    model, optimizer = make('SGD', dtype, gpu)
    optimizer.add_hook(hooks.GradientClipping(1.))
    for param in model.params():
        param.grad = gpu.xp.full(param.shape, 8, dtype)
    optimizer.call_hooks('pre')
    norm = np.sqrt(sum((x.grad.get().astype('d') ** 2).sum() for x in model.params()))
    np.testing.assert_allclose(norm, 1, 1e-3)


def tie(model, optimizer):
    model.p0.array = model.p3.array[:12].reshape(3, 4)
    model.p2.grad = model.p1.grad.reshape(1)


def leave_out(model, optimizer):
    model.p0.update_rule.enabled = False
    model.p6.update_rule = None
    model.p4.update_rule.hyperparam.alpha = .5


def add_a_hook(model, optimizer):
    rule = model.p3.update_rule
    rule.add_hook(hooks.WeightDecay(.5), name=f'decay {rule.t}')


def transpose(model, optimizer):
    model.p6.grad = model.p6.grad.T


def use_float32(model, optimizer):
    optimizer.use_fp32_update()


def set_scale(value):
    def change(model, optimizer):
        for param in model.params():
            param._loss_scale = value

    change.__name__ = f'scale {value}'
    return change


def share_a_gradient(model, optimizer):
    model.p2.grad = model.p1.grad.reshape(1)
    set_scale(4.)(model, optimizer)  # Chainer divides it twice


def use_the_array_as_gradient(model, optimizer):
    model.p0.grad = model.p0.array


@pytest.mark.parametrize('dtype', ['float16', 'float32'])
@pytest.mark.parametrize('change', [
    tie, leave_out, add_a_hook, transpose, use_float32, set_scale(0), set_scale(3.),
    set_scale(65536.), share_a_gradient, use_the_array_as_gradient])
@pytest.mark.filterwarnings('ignore:overflow:RuntimeWarning')  # 65536 in float16
def test_parameters_that_differ(gpu, change, dtype):
    (model, optimizer), (other, alone) = make('Adam', dtype, gpu), make('Adam', dtype, gpu)
    one_by_one(other, alone)
    for step in range(3):
        for each, rule in (model, optimizer), (other, alone):
            set_gradients(each, step)
            change(each, rule)
            rule.update()
    assert_same_bits(model, other)


def unowned(array):
    """Return another array on the same memory, as from another library."""
    from cupy import cuda, ndarray

    memory = cuda.UnownedMemory(array.data.ptr, array.nbytes, array)
    return ndarray(array.shape, array.dtype, cuda.MemoryPointer(memory, 0))


def share_memory(model, optimizer):
    model.p6.array = unowned(model.p0.array)
    model.p6.grad = model.p0.grad.copy()


def use_an_array_as_gradient(model, optimizer):
    model.p2.grad = model.p1.array.reshape(1)


@pytest.mark.parametrize('change', [share_memory, share_a_gradient, use_an_array_as_gradient])
def test_shared_memory_is_changed_by_one_launch_at_a_time(gpu, is_virtual, change):
    model, optimizer = make('SGD', 'float32', gpu)
    set_gradients(model, 0)
    change(model, optimizer)
    number = launches(optimizer.update, is_virtual)
    assert number is None or number >= 2


@pytest.mark.parametrize('scale', ['np.float64(4)', 'cupy.array(4, "f")'])
def test_loss_scales_of_other_types(gpu, scale):
    import cupy

    (model, optimizer), (other, alone) = make('Adam', 'float32', gpu), make('Adam', 'float32', gpu)
    one_by_one(other, alone)
    for each, rule in (model, optimizer), (other, alone):
        rule.add_hook(hooks.WeightDecay(.1))
        set_gradients(each, 0)
        set_scale(eval(scale, {'np': np, 'cupy': cupy}))(each, rule)
        rule.update()
    assert_same_bits(model, other)


def test_different_initial_learning_rates(gpu):
    results = []
    for change in (lambda model, optimizer: None), one_by_one:
        model, _ = make('SGD', 'float32', gpu)
        optimizer = optimizers.AdaBound(gpu.xp.array(.001, 'f')).setup(model)
        change(model, optimizer)
        optimizer.alpha, optimizer.final_lr = .001, 1e-6  # small enough to be the step
        for step in range(3):
            set_gradients(model, step)
            model.p4.update_rule.initial_alpha = .1 if step else .001
            optimizer.update()
        results.append(model)
    assert_same_bits(*results)


def test_parameters_of_other_layouts(gpu):
    with chainer.using_config('compute_mode', 'cudnn_fast'):
        model = chainer.links.Convolution2D(2, 3, 1)
    model.to_device(gpu)
    optimizer = optimizers.MomentumSGD(lr=1).setup(model)
    before = model.W.raw_array.copy()
    for param in model.params():
        param._set_grad(gpu.xp.ones_like(param.raw_array), layout_check=False)
    optimizer.update()
    assert (model.W.raw_array == before - 1).all()


def test_a_replaced_kernel(gpu, monkeypatch):
    import cupy

    model, optimizer = make('SGD', 'float32', gpu)
    before = [param.array.copy() for param in model.params()]
    set_gradients(model, 0)
    monkeypatch.setattr(optimizers.sgd.SGDRule, '_kernel', cupy.ElementwiseKernel(
        'T grad, T lr', 'T param', 'param += 1', 'plus_one'))
    optimizer.update()
    for x, param in zip(before, model.params(), strict=True):
        assert (param.array == x + 1).all()


def test_gradients_that_are_not_finite(gpu):
    xp = gpu.xp
    grads = [xp.ones(n, 'f') for n in (1, 0, 9000, 3)]
    assert device_gradients.are_finite(grads) == [True] * 4
    grads[2][8999], grads[0][0] = np.nan, -np.inf
    assert device_gradients.are_finite(grads) == [False, True, False, True]
    assert device_gradients.are_finite([*grads, None]) is None
    assert device_gradients.are_finite([*grads, xp.ones(2, 'd')]) is None


def test_other_streams(gpu):
    """Tables are uploaded in the order of the stream that uses them."""
    import cupy

    (model, optimizer), (other, alone) = make('Adam', 'float32', gpu), make('Adam', 'float32', gpu)
    one_by_one(other, alone)
    gpu.device.synchronize()  # such a stream does not wait for the default stream
    for step in range(3):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for each, rule in (model, optimizer), (other, alone):
                set_gradients(each, step)
                rule.update()
            stream.synchronize()
    assert_same_bits(model, other)


@pytest.mark.parametrize('scale', [None, 8.])
@pytest.mark.parametrize('name', ['MomentumSGD', 'Adam'])
def test_float32_copies_of_float16(gpu, is_virtual, name, scale):
    """Gradients are cast by one launch, parameters by another; ``array`` stays the same object."""
    (model, optimizer), (other, alone) = make(name, 'float16', gpu), make(name, 'float16', gpu)
    for each, rule in (model, optimizer), (other, alone):
        for param in each.p0, each.p6:  # such as those of batch normalization
            param.array = param.array.astype('f')
        rule.use_fp32_update()
    one_by_one(other, alone)
    arrays = []
    for step in range(4):
        for each in model, other:
            set_gradients(each, step)
            for param in each.params():
                param._loss_scale = scale
        number = launches(optimizer.update, is_virtual)
        alone.update()
        arrays.append([param.array for param in model.params()])
    assert all(x is y for x, y in zip(arrays[1], arrays[3], strict=True))
    assert_same_bits(model, other)
    copies = [[copy for param in each.params()
               if (copy := param.update_rule._fp32_param) is not None] for each in (model, other)]
    assert len(copies[0]) == len(SHAPES) - 2
    for x, y in zip(*copies, strict=True):
        assert x.grad is y.grad is None
        np.testing.assert_array_equal(x.array.get(), y.array.get())
    if is_virtual:
        assert number == 4  # the float32 parameters by one

