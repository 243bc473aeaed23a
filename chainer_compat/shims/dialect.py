"""``CHAINER_COMPAT_DIALECT=1``, or 2 to 6: results as in that version, where they changed silently.

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

from chainer_compat import _patch

VARIABLE = 'CHAINER_COMPAT_DIALECT'

#: Defaults that changed: the last version that had them, by module, function and argument.
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

#: Arguments of version 1 at positions that have another meaning now: by module and function, the
#: first such position (that of ``self`` is 0), and the names.
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

#: Other entries: the last version, the modules, and the patch.
PATCHES: list[tuple[int, tuple[str, ...], _patch.Patch]] = []


def version() -> int | None:
    """Return the version of Chainer that the program was written for, if the variable says it."""
    value = os.environ.get(VARIABLE, '')
    if value not in ('', *'1234567'):
        raise ValueError(f'{VARIABLE} must be 1 to 7, the version of Chainer for which the program '
                         f'was written, but it is {value!r}.')
    return int(value) if value else None


def register() -> None:
    """Register the patches of this version, which must come after all others."""
    selected = version()
    if selected is None:
        return
    for last, modules, patch in PATCHES:
        if selected <= last:
            _patch.patch(*modules)(patch)
    old = {key: value for key, (last, value) in DEFAULTS.items() if selected <= last}
    if old:
        _patch.patch(*{module for module, _, _ in old})(_set_defaults(old))


def until(last: int, *modules: str) -> Callable[[_patch.Patch], _patch.Patch]:
    """Add a patch that restores what version ``last`` and earlier did."""

    def add(patch: _patch.Patch) -> _patch.Patch:
        PATCHES.append((last, modules, patch))
        return patch

    return add


def _set_defaults(old: dict[tuple[str, str, str], Any]) -> _patch.Patch:
    def old_defaults(module: types.ModuleType) -> None:
        for (name, path, argument), value in old.items():
            if name == module.__name__:
                function = inspect.unwrap(_get(module, path))
                names = inspect.getfullargspec(function).args
                defaults = list(function.__defaults__)
                defaults[names.index(argument) - len(names)] = value
                function.__defaults__ = tuple(defaults)

    return old_defaults


@until(1, 'chainer.links.connection.convolution_nd', 'chainer.links.connection.deconvolution_nd')
def no_bias(module: Any) -> None:
    """Create no bias with ``initial_bias=None``, the default of ConvolutionND."""
    def change(default: Any, init: Any) -> Any:
        @functools.wraps(init)
        def init_without_bias(self: Any, *args: Any, **kwargs: Any) -> None:
            if len(args) < 7 and kwargs.get('initial_bias', default) is None:
                kwargs.setdefault('nobias', True)
            init(self, *args, **kwargs)

        return init_without_bias

    for name, default in {'ConvolutionND': None, 'DeconvolutionND': 0}.items():
        if hasattr(module, name):
            _replace(module, f'{name}.__init__', functools.partial(change, default))


@until(1, *(f'chainer.{module}' for module, _ in POSITIONS))
def old_positions(module: Any) -> None:
    """Take arguments in the order of version 1."""
    for (name, path), (first, *names) in POSITIONS.items():
        if f'chainer.{name}' == module.__name__:
            _replace(module, path, functools.partial(_by_name, first, names))


def _by_name(first: int, names: list[str], function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) <= first or _is_called_by_chainer():
            return function(*args, **kwargs)
        return function(*args[:first], **dict(zip(names, args[first:], strict=False)), **kwargs)

    return call


@until(1, 'chainer.functions.array.split_axis')
def one_section(module: Any) -> None:
    """Return one section as a variable, not as a tuple."""
    def change(split_axis: Any) -> Any:
        @functools.wraps(split_axis)
        def split(x: Any, indices_or_sections: Any, axis: int, force_tuple: bool = False) -> Any:
            force_tuple = force_tuple or _is_called_by_chainer()
            return split_axis(x, indices_or_sections, axis, force_tuple)

        return split

    _replace(module, 'split_axis', change)


@until(1, 'chainer.initializer')
def fan_out(module: Any) -> None:
    """Compute the fan-out of convolutions without the size of the kernel."""
    get_fans = module.get_fans
    module.get_fans = lambda shape: (get_fans(shape)[0], shape[0])


@until(1, 'chainer.variable')
def length_of_variable(module: Any) -> None:
    """Return the number of elements."""
    def change(length: Any) -> Any:
        return lambda self: length(self) if _is_called_by_chainer() else self.size

    _replace(module, 'Variable.__len__', change)


@until(1, 'chainer.training.extensions.evaluator')
def evaluator_in_train_mode(module: Any) -> None:
    """Leave the mode to the model."""
    module.configuration = types.SimpleNamespace(
        using_config=lambda name, value: contextlib.nullcontext())


@until(1, *(f'chainer.links.model.vision.{name}' for name in ('googlenet', 'resnet', 'vgg')))
def vision_models_in_test_mode(module: Any) -> None:
    """Use the test mode unless an argument says otherwise."""
    from chainer.configuration import using_config

    def change(forward: Any) -> Any:
        @functools.wraps(forward)
        def forward_in_test_mode(*args: Any, **kwargs: Any) -> Any:
            with using_config('train', False):
                return forward(*args, **kwargs)

        return forward_in_test_mode

    for name in {'GoogLeNet', 'ResNetLayers', 'VGGLayers'} & set(vars(module)):
        _replace(module, f'{name}.forward', change)


@until(1, 'chainer.optimizer')
def late_parameters(module: Any) -> None:
    """Update parameters that were added after setup."""
    def change(update: Any) -> Any:
        @functools.wraps(update)
        def update_all(self: Any, *args: Any, **kwargs: Any) -> None:
            for param in self.target.params():
                if param.update_rule is None:
                    param.update_rule = self.create_update_rule()
            update(self, *args, **kwargs)

        return update_all

    _replace(module, 'GradientMethod.update', change)


@until(2, 'chainer.functions.math.matmul')
def columns_in_matmul(module: Any) -> None:
    """Treat vectors as matrices with one column."""
    def change(matmul: Any) -> Any:
        @functools.wraps(matmul)
        def matmul_of_columns(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
            if not _is_called_by_chainer():
                a, b = (x.reshape(-1, 1) if x.ndim == 1 else x for x in (a, b))
            return matmul(a, b, *args, **kwargs)

        return matmul_of_columns

    _replace(module, 'matmul', change)


@until(3, 'chainer.functions.normalization.batch_normalization')
def eps_in_running_variance(module: Any) -> None:
    """Add ``eps`` to the variance, which is then averaged."""
    def change(forward: Any) -> Any:
        @functools.wraps(forward)
        def forward_and_add(self: Any, inputs: Any) -> Any:
            outputs = forward(self, inputs)
            m = inputs[0].size // inputs[1].size
            if self.running_var is not None:
                self.running_var += (1 - self.decay) * m / max(m - 1, 1) * self.eps
            return outputs

        return forward_and_add

    _replace(module, 'BatchNormalization.forward', change)


def order_in_place(module: Any) -> None:
    """Shuffle the order of the last epoch, instead of drawing a new one."""
    class ShuffleOrderSampler(module.ShuffleOrderSampler):
        def __call__(self, current_order: Any, current_position: int) -> Any:
            order = current_order.copy()
            self._random.shuffle(order)
            return order

    module.ShuffleOrderSampler = ShuffleOrderSampler


until(2, 'chainer.iterators.multiprocess_iterator')(order_in_place)
until(4, 'chainer.iterators.multithread_iterator', 'chainer.iterators.serial_iterator')(
    order_in_place)


@until(5, 'chainer.functions.math.clip')
def gradient_of_clip(module: Any) -> None:
    """Return no gradient where the input equals a bound."""
    def change(init: Any) -> Any:
        @functools.wraps(init)
        def init_without_bounds(self: Any, x: Any, x_min: Any, x_max: Any) -> None:
            init(self, x, x_min, x_max)
            self.cond = self.cond & (x != x_min) & (x != x_max)

        return init_without_bounds

    _replace(module, 'ClipGrad.__init__', change)


@until(5, 'chainer.variable')
def gradient_of_outputs(module: Any) -> None:
    """Keep the gradient of the variable whose backward is called."""
    def change(backward: Any) -> Any:
        @functools.wraps(backward)
        def backward_and_keep(self: Any, *args: Any, **kwargs: Any) -> None:
            grad = self.grad_var
            backward(self, *args, **kwargs)
            if grad is None and self.size == 1:
                scale = kwargs.get('loss_scale') or 1
                grad = module.Variable(self.xp.full_like(self.array, scale))
            self.grad_var = grad

        return backward_and_keep

    _replace(module, 'Variable.backward', change)


def _is_called_by_chainer() -> bool:
    """Return whether Chainer's own code called the function that asks."""
    name: str = sys._getframe(2).f_globals['__name__']
    return name.partition('.')[0] in ('chainer', 'chainer_compat', 'chainermn')


def _get(module: Any, path: str) -> Any:
    return functools.reduce(getattr, path.split('.'), module)


def _replace(module: Any, path: str, change: Callable[[Any], Any]) -> None:
    """Replace a function or method of a module by what ``change`` returns for it."""
    owner, _, name = path.rpartition('.')
    holder = _get(module, owner) if owner else module
    setattr(holder, name, change(getattr(holder, name)))
