"""Arguments of Chainer 1 that Chainer 7.8.1 rejects: calls that use them work again.

The arguments became options of ``chainer.config``, which are set during the call. Each call site
gets a DeprecationWarning, which says how to write it now.
"""

import contextlib
import functools
import math
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from chainer_compat._patch import edit, patch

#: By module and function: how many positional arguments it has now, and the names of those that
#: followed in Chainer 1. ``None`` if the arguments that return were given by name.
CALLS: dict[str, dict[str, tuple[int | None, tuple[str, ...]]]] = {
    'chainer.functions.activation.rrelu': {'rrelu': (None, ('train',))},
    'chainer.functions.array.spatial_transformer_grid': {
        'spatial_transformer_grid': (2, ('use_cudnn',))},
    'chainer.functions.array.spatial_transformer_sampler': {
        'spatial_transformer_sampler': (2, ('use_cudnn',))},
    'chainer.functions.noise.dropout': {'dropout': (2, ('train',))},
    'chainer.functions.noise.zoneout': {'zoneout': (3, ('train',))},
    'chainer.functions.normalization.batch_normalization': {
        'batch_normalization': (None, ('train',))},
    'chainer.functions.rnn.n_step_gru': {
        'n_step_gru': (6, ('train', 'use_cudnn')),
        'n_step_bigru': (6, ('train', 'use_cudnn'))},
    'chainer.functions.rnn.n_step_lstm': {
        'n_step_lstm': (7, ('train', 'use_cudnn')),
        'n_step_bilstm': (7, ('train', 'use_cudnn'))},
    # Not n_step_birnn: Chainer 7.8.1 does not reject these arguments there, but ignores them.
    'chainer.functions.rnn.n_step_rnn': {'n_step_rnn': (None, ('train', 'use_cudnn'))},
    'chainer.links.caffe.caffe_function': {'CaffeFunction.forward': (4, ('train',))},
    'chainer.links.connection.mlp_convolution_2d': {
        'MLPConvolution2D.__init__': (None, ('wscale',))},
    'chainer.links.model.vision.googlenet': {
        'GoogLeNet.forward': (3, ('train',)),
        'GoogLeNet.extract': (4, ('train', 'volatile'))},
    'chainer.links.model.vision.resnet': {
        'ResNetLayers.forward': (3, ('test',)),
        'ResNetLayers.extract': (4, ('test', 'volatile'))},
    'chainer.links.model.vision.vgg': {
        'VGGLayers.forward': (3, ('test',)),
        'VGGLayers.extract': (4, ('test', 'volatile'))},
    'chainer.links.normalization.batch_normalization': {
        'BatchNormalization.forward': (2, ('test', 'finetune'))},
    'chainer.links.rnn.n_step_lstm': {'NStepLSTMBase.forward': (4, ('train',))},
    'chainer.links.rnn.n_step_rnn': {'NStepRNNBase.forward': (3, ('train',))},
    'chainer.training.trainer': {'Trainer.extend': (None, ('invoke_before_training',))},
}

_OUTSIDE_OF_PROGRAMS = ('chainer', 'chainer_compat')

#: Values that are what Chainer 7 does without the argument. They are ignored in all functions that
#: reject the argument and are not in ``CALLS``: mostly constructors, where an option of
#: ``chainer.config`` would end too early.
WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    'deterministic': (False,),
    'invoke_before_training': (False,),
    'requires_x_grad': (True,),
    'use_cudnn': (True,),
    'volatile': (False, 'off', 'auto'),
    'wscale': (1,),
}

Arguments = dict[str, Any]


def _train(value: Any, others: Arguments) -> Arguments:
    return {'train': bool(value)}


def _test(value: Any, others: Arguments) -> Arguments:
    # Chainer 1 used the statistics of the batch with ``test=True, finetune=True``.
    return {'train': not value or bool(others.get('finetune'))}


def _volatile(value: Any, others: Arguments) -> Arguments | None:
    if value in (True, 'on'):
        return {'enable_backprop': False}
    return {} if value in WITHOUT_EFFECT['volatile'] else None


def _use_cudnn(value: Any, others: Arguments) -> Arguments:
    return {'use_cudnn': 'always' if value else 'never'}


def _wscale(value: Any, others: Arguments) -> Arguments | None:
    from chainer import initializers

    if others.get('conv_init') is not None:
        return None
    # Chainer 1 scaled the initial weights by the square root.
    return {'conv_init': initializers.LeCunNormal(math.sqrt(value))}


def _invoke_before_training(value: Any, others: Arguments) -> Arguments:
    return {'call_before_training': bool(value)}


Translation = Callable[[Any, Arguments], Arguments | None]

#: The options of ``chainer.config`` that replace an argument; ``None`` if there are none.
OPTIONS: dict[str, Translation] = {
    'test': _test, 'train': _train, 'use_cudnn': _use_cudnn, 'volatile': _volatile}

#: The arguments that replace an argument.
ARGUMENTS: dict[str, Translation] = {
    'invoke_before_training': _invoke_before_training, 'wscale': _wscale}

NOW = {
    'invoke_before_training': 'pass call_before_training=True',
    'test': "use chainer.using_config('train', False)",
    'train': "use chainer.using_config('train', ...)",
    'use_cudnn': "use chainer.using_config('use_cudnn', 'always' or 'never')",
    'volatile': 'use chainer.no_backprop_mode()',
    'wscale': 'pass conv_init=chainer.initializers.LeCunNormal(sqrt(wscale))',
}


@patch(*CALLS)
def old_arguments(module: ModuleType) -> None:
    """All versions: ``train``, ``test``, ``volatile`` and other arguments of Chainer 1 work again.

    Chainer 7.8.1 raised an error that names the replacement, usually ``chainer.using_config``.
    """
    for path, (n_positional, names) in CALLS[module.__name__].items():
        owner, _, name = path.rpartition('.')
        holder = getattr(module, owner) if owner else module
        setattr(holder, name, _accepting(getattr(holder, name), n_positional, names))


@edit('chainer.utils.argument')
def arguments_without_effect() -> dict[str, str]:
    """All versions: ``volatile='off'`` and other values that are the default now are ignored.

    Chainer 7.8.1 raised an error for any value.
    """
    return {
        'raise ValueError(message)':
            'from chainer_compat.shims import old_arguments; '
            'old_arguments.drop(kwargs, key, message)',
        'check_unexpected_kwargs(kwargs, **unexpected)\n':
            'if not check_unexpected_kwargs(kwargs, **unexpected) and not kwargs: '
            'return tuple(values)\n',
    }


def drop(kwargs: Arguments, name: str, message: str) -> None:
    """Remove an argument whose value has no effect; otherwise raise Chainer's error."""
    value = kwargs[name]
    if not isinstance(value, bool | int | float | str) or value not in WITHOUT_EFFECT.get(name, ()):
        raise ValueError(message)
    del kwargs[name]
    _warn(f'{name}={value!r} is ignored, because it is the behavior of Chainer 7: remove it.')


def _accepting(function: Any, n_positional: int | None, names: tuple[str, ...]) -> Any:
    """Return ``function`` with its old arguments; others are passed without a look."""
    old = frozenset(names) & NOW.keys()
    limit = sys.maxsize if n_positional is None else n_positional

    @functools.wraps(function)
    def accepting(*args: Any, **kwargs: Any) -> Any:
        if len(args) > limit or (kwargs and not old.isdisjoint(kwargs)):
            return _call(function, limit, names, args, kwargs)
        return function(*args, **kwargs)

    return accepting


def _call(function: Any, limit: int, names: tuple[str, ...], args: tuple[Any, ...],
          kwargs: Arguments) -> Any:
    import chainer

    given = dict(zip(names, args[limit:], strict=False))
    if len(args) > limit + len(names) or given.keys() & kwargs.keys():
        return function(*args, **kwargs)  # raises the error
    modern = {**kwargs, **given}
    used = [name for name in names if name in modern and name in NOW]
    values = {name: modern.pop(name) for name in used}
    config: Arguments = {}
    for name, value in values.items():
        translated = (OPTIONS.get(name) or ARGUMENTS[name])(value, modern)
        if translated is None:
            return function(*args, **kwargs)  # raises the error
        (config if name in OPTIONS else modern).update(translated)
    for name in used:
        _warn(f'{function.__qualname__}({name}=...) is the interface of Chainer 1: {NOW[name]}.')
    with contextlib.ExitStack() as stack:
        for name, value in config.items():
            stack.enter_context(chainer.using_config(name, value))
        return function(*args[:limit], **modern)


def _warn(message: str) -> None:
    """Warn at the line of the program, which is outside of Chainer."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals['__name__'].split('.')[0] in _OUTSIDE_OF_PROGRAMS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, DeprecationWarning, stacklevel=level)
