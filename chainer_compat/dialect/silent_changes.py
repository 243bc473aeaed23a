"""``CHAINER_COMPAT_DIALECT=1`` to ``6``: restores what silently changed after that version.

Without the variable, nothing is registered.
"""

import contextlib
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from chainer_compat.patching import registry

VARIABLE = 'CHAINER_COMPAT_DIALECT'

#: Changed defaults by module, function and argument: the last version with the old default, and
#: the old default.
DEFAULTS: dict[tuple[str, str, str], tuple[int, Any]] = {
    ('chainer.links.rnn.lstm', 'LSTM.__init__', 'forget_bias_init'): (1, 0),
    ('chainer.links.rnn.lstm', 'LSTMBase.__init__', 'forget_bias_init'): (1, 0),
    ('chainer.link', 'Chain.copyparams', 'copy_persistent'): (4, False),
    ('chainer.link', 'ChainList.copyparams', 'copy_persistent'): (4, False),
    ('chainer.link', 'Link.copyparams', 'copy_persistent'): (4, False),
    ('chainer.links.normalization.batch_normalization', 'BatchNormalization.__init__',
     'initial_avg_var'): (4, 0),
    ('chainer.links.normalization.batch_renormalization', 'BatchRenormalization.__init__',
     'initial_avg_var'): (4, 0),
    ('chainer.training.updaters.multiprocess_parallel_updater',
     'MultiprocessParallelUpdater.__init__', 'auto_new_epoch'): (4, False),
    ('chainer.training.updaters.parallel_updater', 'ParallelUpdater.__init__',
     'auto_new_epoch'): (4, False),
    ('chainer.training.updaters.standard_updater', 'StandardUpdater.__init__',
     'auto_new_epoch'): (4, False),
}

_POOLING = (5, 'use_cudnn')
_CONVOLUTION = (5, 'use_cudnn', 'cover_all', 'deterministic')

#: Arguments of version 1 at positions that have a different meaning now. By module and function:
#: the first such position (``self`` is at 0), and the names from there on.
POSITIONS: dict[tuple[str, str], tuple[Any, ...]] = {
    ('functions.activation.log_softmax', 'log_softmax'): (1, 'use_cudnn'),
    ('functions.activation.softmax', 'softmax'): (1, 'use_cudnn', 'axis'),
    ('functions.connection.convolution_2d', 'convolution_2d'): _CONVOLUTION,
    ('functions.connection.convolution_nd', 'convolution_nd'): _CONVOLUTION[:3],
    ('functions.connection.deconvolution_nd', 'deconvolution_nd'): (6, 'use_cudnn'),
    ('functions.connection.dilated_convolution_2d', 'dilated_convolution_2d'): (
        6, 'use_cudnn', 'cover_all'),
    ('functions.loss.sigmoid_cross_entropy', 'sigmoid_cross_entropy'): (
        2, 'use_cudnn', 'normalize', 'reduce'),
    ('functions.loss.softmax_cross_entropy', 'softmax_cross_entropy'): (
        2, 'use_cudnn', 'normalize', 'cache_score', 'class_weight', 'ignore_label', 'reduce'),
    ('functions.normalization.batch_normalization', 'fixed_batch_normalization'): (6, 'use_cudnn'),
    ('functions.pooling.average_pooling_nd', 'average_pooling_nd'): (4, 'use_cudnn'),
    ('functions.pooling.max_pooling_nd', 'max_pooling_2d'): _POOLING,
    ('functions.pooling.max_pooling_nd', 'max_pooling_nd'): _POOLING,
    ('functions.rnn.n_step_rnn', 'n_step_birnn'): (6, 'train', 'use_cudnn', 'activation'),
    ('functions.rnn.n_step_rnn', 'n_step_rnn'): (6, 'train', 'use_cudnn', 'activation'),
    ('links.activation.maxout', 'Maxout.__init__'): (4, 'wscale', 'initialW', 'initial_bias'),
    ('links.connection.convolution_2d', 'Convolution2D.__init__'): (
        6, 'wscale', 'bias', 'nobias', 'use_cudnn', 'initialW', 'initial_bias', 'deterministic'),
    ('links.connection.convolution_nd', 'ConvolutionND.__init__'): (
        7, 'initialW', 'initial_bias', 'use_cudnn', 'cover_all'),
    ('links.connection.deconvolution_2d', 'Deconvolution2D.__init__'): (
        6, 'wscale', 'bias', 'nobias', 'outsize', 'use_cudnn', 'initialW', 'initial_bias',
        'deterministic'),
    ('links.connection.deconvolution_nd', 'DeconvolutionND.__init__'): (
        7, 'outsize', 'initialW', 'initial_bias', 'use_cudnn'),
    ('links.connection.dilated_convolution_2d', 'DilatedConvolution2D.__init__'): (
        7, 'wscale', 'bias', 'nobias', 'use_cudnn', 'initialW', 'initial_bias'),
    ('links.connection.linear', 'Linear.__init__'): (
        3, 'wscale', 'bias', 'nobias', 'initialW', 'initial_bias'),
    ('links.connection.mlp_convolution_2d', 'MLPConvolution2D.__init__'): (
        6, 'wscale', 'activation', 'use_cudnn', 'conv_init', 'bias_init'),
    ('links.normalization.batch_normalization', 'BatchNormalization.__init__'): (9, 'use_cudnn'),
    ('links.rnn.gru', 'GRU.__init__'): (1, 'n_units', 'n_inputs'),
    ('training.extension', 'make_extension'): (3, 'invoke_before_training', 'finalizer'),
}

#: Other changes: the last version with the old behavior, the module, and the patch.
PATCHES: list[tuple[int, str, registry.Patch]] = []

Function = Callable[..., Any]


def version() -> int | None:
    """Return the version in ``CHAINER_COMPAT_DIALECT``, or ``None`` if it is not set."""
    value = os.environ.get(VARIABLE, '')
    if value not in ('', *'1234567'):
        raise ValueError(f'{VARIABLE} must be the major version of Chainer that your script was '
                         f'written for, 1 to 6 (7 changes nothing), not {value!r}.')
    return int(value) if value else None


def register() -> None:
    """Register the patches of the selected version. Call this after all other registrations."""
    selected = version()
    if selected is None:
        return
    for last, module, patch in PATCHES:
        if selected <= last:
            registry.patch(module)(patch)
    old = {key: value for key, (last, value) in DEFAULTS.items() if selected <= last}
    if old:
        registry.patch(*{module for module, _, _ in old})(_set_defaults(old))


def _set_defaults(old: dict[tuple[str, str, str], Any]) -> registry.Patch:
    def old_defaults(module: Any) -> None:
        for (name, path, argument), value in old.items():
            if name == module.__name__:
                function = inspect.unwrap(functools.reduce(getattr, path.split('.'), module))
                names = inspect.getfullargspec(function).args
                defaults = list(function.__defaults__)
                defaults[names.index(argument) - len(names)] = value
                function.__defaults__ = tuple(defaults)

    return old_defaults


def replaces(last: int, module: str, path: str, inside: bool = True) -> Callable[
        [Function], Function]:
    """Replace a Chainer function with the decorated one for versions up to ``last``.

    The decorated function gets the original as its first argument. If ``inside`` is false, calls
    from within Chainer use the original, because they rely on its current behavior.
    """
    def add(function: Function) -> Function:
        def patch(module: Any) -> None:
            owner, _, name = path.rpartition('.')
            holder = getattr(module, owner) if owner else module
            original = getattr(holder, name)

            @functools.wraps(original, updated=())
            def call(*args: Any, **kwargs: Any) -> Any:
                caller = sys._getframe(1).f_globals.get('__name__', '').partition('.')[0]
                if not inside and caller in ('chainer', 'chainer_compat', 'chainermn'):
                    return original(*args, **kwargs)
                return function(original, *args, **kwargs)

            setattr(holder, name, call)

        patch.__name__ = function.__name__
        PATCHES.append((last, f'chainer.{module}', patch))
        return function

    return add


@replaces(1, 'links.connection.convolution_nd', 'ConvolutionND.__init__')
def no_bias(init: Function, *args: Any, **kwargs: Any) -> None:
    """Create no bias if ``initial_bias`` is not given."""
    if len(args) < 8 and kwargs.get('initial_bias') is None:
        kwargs.setdefault('nobias', True)
    init(*args, **kwargs)


@replaces(1, 'links.connection.deconvolution_nd', 'DeconvolutionND.__init__')
def no_bias_if_none(init: Function, *args: Any, initial_bias: Any = 0, **kwargs: Any) -> None:
    """Create no bias if ``initial_bias`` is ``None``."""
    if len(args) < 8:
        kwargs = {'nobias': initial_bias is None, 'initial_bias': initial_bias, **kwargs}
    init(*args, **kwargs)


def _add_positions(module: str, path: str, first: int, *names: str) -> None:
    @replaces(1, module, path, inside=False)
    def old_positions(original: Function, *args: Any, **kwargs: Any) -> Any:
        """Take arguments in the order of version 1."""
        return original(*args[:first], **dict(zip(names, args[first:], strict=False)), **kwargs)


for _key, _positions in POSITIONS.items():
    _add_positions(*_key, *_positions)


@replaces(1, 'functions.array.split_axis', 'split_axis', inside=False)
def one_section(split_axis: Function, x: Any, indices_or_sections: Any, axis: int,
                force_tuple: bool = False) -> Any:
    """Return one section as a variable, not as a tuple."""
    return split_axis(x, indices_or_sections, axis, force_tuple)


@replaces(1, 'initializer', 'get_fans')
def fan_out(get_fans: Function, shape: tuple[int, ...]) -> tuple[int, int]:
    """Compute the fan-out of convolutions without the kernel size."""
    return get_fans(shape)[0], shape[0]


@replaces(1, 'variable', 'Variable.__len__', inside=False)
def length_of_variable(length: Function, variable: Any) -> Any:
    """Return the number of elements."""
    return variable.size


def evaluator_in_train_mode(module: Any) -> None:
    """Keep Evaluator from switching to test mode."""
    module.configuration = types.SimpleNamespace(
        using_config=lambda name, value: contextlib.nullcontext())


def variables_for_models(module: Any) -> None:
    """Call the model with variables, not with arrays."""
    original = module.convert._call_converter

    def to_variable(value: Any) -> Any:
        import chainer

        return chainer.Variable(value) if isinstance(value, chainer.get_array_types()) else value

    def call_converter(*args: Any) -> Any:
        batch = original(*args)
        if isinstance(batch, tuple):
            return tuple(map(to_variable, batch))
        if isinstance(batch, dict):
            return {key: to_variable(value) for key, value in batch.items()}
        return to_variable(batch)

    module.convert = types.SimpleNamespace(_call_converter=call_converter)


PATCHES += [(1, 'chainer.training.extensions.evaluator', evaluator_in_train_mode),
            (1, 'chainer.training.extensions.evaluator', variables_for_models),
            (1, 'chainer.training.updaters.standard_updater', variables_for_models)]


@replaces(1, 'links.model.vision.googlenet', 'GoogLeNet.forward')
@replaces(1, 'links.model.vision.resnet', 'ResNetLayers.forward')
@replaces(1, 'links.model.vision.vgg', 'VGGLayers.forward')
def vision_models_in_test_mode(forward: Function, *args: Any, **kwargs: Any) -> Any:
    """Use test mode unless an argument selects training mode."""
    import chainer

    with chainer.using_config('train', False):
        return forward(*args, **kwargs)


@replaces(1, 'optimizer', 'GradientMethod.update')
def late_parameters(update: Function, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    """Update parameters that were added after setup."""
    for param in optimizer.target.params():
        if param.update_rule is None:
            param.update_rule = optimizer.create_update_rule()
    update(optimizer, *args, **kwargs)


@replaces(2, 'functions.math.matmul', 'matmul', inside=False)
def columns_in_matmul(matmul: Function, a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
    """Treat vectors as matrices with one column."""
    a, b = (x.reshape(-1, 1) if x.ndim == 1 else x for x in (a, b))
    return matmul(a, b, *args, **kwargs)


@replaces(3, 'functions.normalization.batch_normalization', 'BatchNormalization.forward')
def eps_in_running_variance(forward: Function, function: Any, inputs: Any) -> Any:
    """Add ``eps`` to the variance before it is averaged."""
    outputs = forward(function, inputs)
    m = inputs[0].size // inputs[1].size
    if function.running_var is not None:
        function.running_var += (1 - function.decay) * m / max(m - 1, 1) * function.eps
    return outputs


def order_in_place(module: Any) -> None:
    """Shuffle the order of the last epoch instead of generating a new one."""
    sampler = module.ShuffleOrderSampler

    def shuffle(self: Any, current_order: Any, current_position: int) -> Any:
        order = current_order.copy()
        self._random.shuffle(order)
        return order

    # Pickles refer to the class by its module.
    module.ShuffleOrderSampler = type(sampler.__name__, (sampler,), {
        '__call__': shuffle, '__module__': module.__name__})


PATCHES += [(2, 'chainer.iterators.multiprocess_iterator', order_in_place),
            (4, 'chainer.iterators.multithread_iterator', order_in_place),
            (4, 'chainer.iterators.serial_iterator', order_in_place)]


@replaces(5, 'functions.math.clip', 'ClipGrad.__init__')
def gradient_of_clip(init: Function, function: Any, x: Any, x_min: Any, x_max: Any) -> None:
    """Return no gradient where the input equals a bound."""
    init(function, x, x_min, x_max)
    function.cond = function.cond & (x != x_min) & (x != x_max)


@replaces(5, 'variable', 'Variable.backward')
def gradient_of_outputs(backward: Function, variable: Any, *args: Any, **kwargs: Any) -> None:
    """Keep the gradient of the variable whose backward is called."""
    if variable.creator_node is None:
        return  # without setting a gradient
    if variable.grad_var is None and variable.size == 1:
        grad = variable.xp.full_like(variable.array, kwargs.get('loss_scale') or 1)
    else:
        grad = variable.grad
    backward(variable, *args, **kwargs)
    variable.grad = grad
