"""Arguments of Chainer 1 to 3 that Chainer 7.8.1 rejects: calls that use them work again.

Most have become options of ``chainer.config``. Such an option is set during the call; for an
argument of a constructor, it is set during all calls of the link. Each call site gets a
DeprecationWarning that gives the current form of the call.
"""

import contextlib
import functools
import math
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from chainer_compat.dialect.flag import ON, Flag
from chainer_compat.dialect.old_options import call_with, set_options
from chainer_compat.patching.registry import patch
from chainer_compat.patching.signatures import wraps

#: By module and function: the number of positional arguments that are the same as in Chainer 1, and
#: the names of the arguments that followed them. A call that is invalid now is interpreted with
#: these positions.
CALLS: dict[str, dict[str, tuple[int, str]]] = {
    **{f'chainer.functions.{path}': {path.partition('.')[2]: row} for path, row in {
        'activation.log_softmax': (1, 'use_cudnn'),
        'activation.relu': (1, 'use_cudnn'),
        'activation.rrelu': (5, 'train'),
        'activation.sigmoid': (1, 'use_cudnn'),
        'activation.softmax': (1, 'use_cudnn axis'),
        'activation.tanh': (1, 'use_cudnn'),
        'array.spatial_transformer_grid': (2, 'use_cudnn'),
        'array.spatial_transformer_sampler': (2, 'use_cudnn'),
        'connection.convolution_2d': (5, 'use_cudnn cover_all deterministic'),
        'connection.convolution_nd': (5, 'use_cudnn cover_all'),
        'connection.deconvolution_2d': (6, 'use_cudnn deterministic'),
        'connection.deconvolution_nd': (6, 'use_cudnn'),
        'connection.dilated_convolution_2d': (6, 'use_cudnn cover_all'),
        'loss.sigmoid_cross_entropy': (2, 'use_cudnn normalize reduce'),
        'loss.softmax_cross_entropy': (
            2, 'use_cudnn normalize cache_score class_weight ignore_label reduce'),
        'noise.dropout': (2, 'train'),
        'noise.zoneout': (3, 'train'),
        'pooling.average_pooling_2d': (4, 'use_cudnn'),
        'pooling.average_pooling_nd': (4, 'use_cudnn'),
        'pooling.spatial_pyramid_pooling_2d': (2, 'pooling_class use_cudnn')}.items()},
    'chainer.datasets.sub_dataset': {
        'get_cross_validation_datasets_random': (3, 'n_fold')},
    'chainer.functions.normalization.batch_normalization': {
        'batch_normalization': (3, 'eps running_mean running_var decay use_cudnn train'),
        'fixed_batch_normalization': (6, 'use_cudnn')},
    'chainer.functions.pooling.max_pooling_nd': {
        'max_pooling_2d': (5, 'use_cudnn'), 'max_pooling_nd': (5, 'use_cudnn')},
    **{f'chainer.functions.rnn.n_step_{name}': {f'n_step_{name}': row, f'n_step_bi{name}': row}
       for name, row in {'gru': (6, 'train use_cudnn'), 'lstm': (7, 'train use_cudnn'),
                         'rnn': (6, 'train use_cudnn activation')}.items()},
    'chainer.links.activation.maxout': {'Maxout.__init__': (4, 'wscale initialW initial_bias')},
    'chainer.links.caffe.caffe_function': {'CaffeFunction.forward': (4, 'train')},
    'chainer.links.connection.convolution_2d': {'Convolution2D.__init__': (
        6, 'wscale bias nobias use_cudnn initialW initial_bias deterministic')},
    'chainer.links.connection.convolution_nd': {
        'ConvolutionND.__init__': (7, 'initialW initial_bias use_cudnn cover_all')},
    'chainer.links.connection.deconvolution_2d': {'Deconvolution2D.__init__': (
        6, 'wscale bias nobias outsize use_cudnn initialW initial_bias deterministic')},
    'chainer.links.connection.deconvolution_nd': {
        'DeconvolutionND.__init__': (7, 'outsize initialW initial_bias use_cudnn')},
    'chainer.links.connection.dilated_convolution_2d': {'DilatedConvolution2D.__init__': (
        7, 'wscale bias nobias use_cudnn initialW initial_bias')},
    'chainer.links.connection.inceptionbn': {'InceptionBN.forward': (2, 'test')},
    'chainer.links.connection.linear': {
        'Linear.__init__': (3, 'wscale bias nobias initialW initial_bias')},
    'chainer.links.connection.mlp_convolution_2d': {'MLPConvolution2D.__init__': (
        6, 'wscale activation use_cudnn conv_init bias_init')},
    'chainer.links.model.vision.googlenet': {
        'GoogLeNet.forward': (3, 'train'), 'GoogLeNet.extract': (4, 'train volatile')},
    'chainer.links.model.vision.resnet': {
        'ResNetLayers.forward': (3, 'test'), 'ResNetLayers.extract': (4, 'test volatile'),
        **{f'{block}.forward': (2, 'test')
           for block in ('BuildingBlock', 'BottleneckA', 'BottleneckB')}},
    'chainer.links.model.vision.vgg': {
        'VGGLayers.forward': (3, 'test'), 'VGGLayers.extract': (4, 'test volatile')},
    'chainer.links.normalization.batch_normalization': {
        'BatchNormalization.__init__': (9, 'use_cudnn'),
        'BatchNormalization.forward': (2, 'test finetune')},
    'chainer.links.rnn.n_step_lstm': {'NStepLSTMBase.forward': (4, 'train')},
    'chainer.links.rnn.n_step_rnn': {
        'NStepRNNBase.__init__': (5, 'use_cudnn initial_bias'),
        'NStepRNNBase.forward': (3, 'train')},
    'chainer.links.rnn.zoneoutlstm': {'StatefulZoneoutLSTM.__init__': (5, 'train')},
    'chainer.serializers.npz': {'load_npz': (2, 'filename'), 'save_npz': (3, 'filename')},
    'chainer.training.extension': {
        'make_extension': (3, 'invoke_before_training finalizer')},
    'chainer.training.extensions._snapshot': {
        'snapshot': (2, 'trigger'), 'snapshot_object': (3, 'trigger')},
    'chainer.training.trainer': {'Trainer.extend': (5, 'invoke_before_training')},
}

_LIBRARIES = ('chainer', 'chainer_compat')

Arguments = dict[str, Any]
#: Returns the replacement of an argument: options of ``chainer.config``, and other arguments.
#: It is called with the value, the other arguments, and the path of the function.
Translation = Callable[[Any, Arguments, str], Arguments]

_OPTIONS = frozenset({'train', 'enable_backprop', 'use_cudnn', 'cudnn_deterministic'})


def _test(value: Any, others: Arguments, path: str) -> Arguments:
    # Chainer 1 used the batch statistics with ``test=True, finetune=True``.
    return {'train': not value or bool(others.get('finetune'))} if value is not None else {}


def _use_cudnn(value: Any, others: Arguments, path: str) -> Arguments:
    if path == 'NStepRNNBase.__init__' and not isinstance(value, int):
        return {'initialW': value}  # at its position in Chainer 3
    return {'use_cudnn': 'always' if value else 'never'}


def _wscale(value: Any, others: Arguments, path: str) -> Arguments:
    name = 'conv_init' if path.startswith('MLP') else 'initialW'
    # Chainer 1 scaled the initial weights by the square root.
    return {name: scaled(others.get(name), math.sqrt(value))}


def scaled(initializer: Any, scale: float) -> Any:
    """Return an initializer for values that are ``scale`` times as large.

    Args:
        initializer: Any initializer that links accept, including a number, an array or ``None``.
        scale: The factor.
    """
    from chainer import initializers

    if initializer is None:
        return initializers.LeCunNormal(scale)
    if not callable(initializer):
        return initializer * scale
    return functools.partial(_initialize, initializer, scale) if scale != 1 else initializer


def _initialize(initializer: Any, scale: float, array: Any) -> None:
    initializer(array)
    array *= scale


#: For each old argument: its translation, and the current form.
TRANSLATIONS: dict[str, tuple[Translation, str]] = {
    'bias': (lambda value, others, path:
             {} if others.get('initial_bias') is not None else {'initial_bias': value},
             'pass initial_bias'),
    'deterministic': (lambda value, others, path: {'cudnn_deterministic': True} if value else {},
                      'set chainer.config.cudnn_deterministic'),
    'filename': (lambda value, others, path: {'file': value}, 'pass file'),
    'invoke_before_training': (
        lambda value, others, path:
            {'call_before_training': bool(value)} if path == 'Trainer.extend' else {},
        'pass call_before_training=True'),
    'n_fold': (lambda value, others, path: {'n_folds': value}, 'pass n_folds'),
    'pooling_class': (lambda value, others, path: {'pooling': value}, "pass pooling='max'"),
    'test': (_test, "use chainer.using_config('train', False)"),
    'train': (lambda value, others, path: {'train': bool(value)},
              "use chainer.using_config('train', ...)"),
    'trigger': (lambda value, others, path: {}, 'pass trigger to Trainer.extend'),
    'use_cudnn': (_use_cudnn, "use chainer.using_config('use_cudnn', 'always' or 'never')"),
    'volatile': (lambda value, others, path:
                 {'enable_backprop': False} if Flag(value) is ON else {},
                 'use chainer.no_backprop_mode()'),
    'wscale': (_wscale, 'pass initialW=chainer.initializers.LeCunNormal(sqrt(wscale))'),
}


@patch(*CALLS)
def old_arguments(module: ModuleType) -> None:
    """All versions: ``train``, ``test``, ``use_cudnn`` and other arguments of Chainer 1 work again.

    Chainer 7.8.1 raised an error, which usually mentioned ``chainer.using_config``.
    """
    for path, (n_same, names) in CALLS[module.__name__].items():
        owner, _, name = path.rpartition('.')
        holder = getattr(module, owner) if owner else module
        setattr(holder, name, with_old_arguments(getattr(holder, name), n_same, names.split()))


@patch('chainer.training.trainer')
def invoke_before_training(module: ModuleType) -> None:
    """All versions: the attribute ``invoke_before_training`` of extensions works again.

    Chainer 7.8.1 ignored it.
    """
    trainer: Any = module.Trainer
    extend = trainer.extend

    @wraps(extend)
    def extend_trainer(self: Any, extension: Any, *args: Any, **kwargs: Any) -> None:
        if _is_before_training(extension):
            warn('invoke_before_training belongs to the Chainer 1 API: use initialize.')
            kwargs.setdefault('call_before_training', True)
        extend(self, extension, *args, **kwargs)

    trainer.extend = extend_trainer


def _is_before_training(extension: Any) -> bool:
    # Avoid getattr, since __getattr__ may return anything. PolynomialShift still has the attribute.
    for holder in extension, *type(extension).__mro__:
        value = getattr(holder, '__dict__', {}).get('invoke_before_training')
        if value is not None and not getattr(holder, '__module__', '').startswith('chainer.'):
            return value is True
    return False


def with_old_arguments(function: Any, n_same: int, names: list[str]) -> Any:
    """Return a wrapper of ``function`` that also accepts its old arguments."""
    old = frozenset(names) & TRANSLATIONS.keys()

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            if not kwargs:
                return function(*args)
            if old.isdisjoint(kwargs):
                return function(*args, **kwargs)
        except TypeError:
            if len(args) <= n_same or _accepts(function, args, kwargs):
                raise
        return _call(function, n_same, names, args, kwargs)

    return call


def _accepts(function: Any, args: tuple[Any, ...], kwargs: Arguments) -> bool:
    import inspect

    with contextlib.suppress(TypeError):
        return bool(inspect.signature(function).bind(*args, **kwargs))
    return False


def _call(function: Any, n_same: int, names: list[str], args: tuple[Any, ...],
          kwargs: Arguments) -> Any:
    path = function.__qualname__
    given = dict(zip(names, args[n_same:], strict=False))
    if len(args) > n_same + len(names) or given.keys() & kwargs.keys():
        return function(*args, **kwargs)  # raises the error
    modern = {**kwargs, **given}
    values = {name: modern.pop(name)
              for name in names if name in modern and name in TRANSLATIONS}
    options: Arguments = {}
    shown = type(args[0]).__name__ if path.endswith('.__init__') else path
    for name, value in values.items():
        translate, now = TRANSLATIONS[name]
        for key, x in translate(value, modern, path).items():
            (options if key in _OPTIONS else modern)[key] = x
        warn(f'{shown}({name}=...) belongs to the Chainer 1 API: {now}.')
    if path.endswith('.__init__'):
        function(*args[:n_same], **modern)
        return set_options(args[0], options)
    result = call_with(options, function, *args[:n_same], **modern)
    if 'trigger' in values:
        result.trigger = values['trigger']
    if path == 'make_extension':
        return functools.partial(_decorate, result, values['invoke_before_training'])
    return result


def _decorate(decorator: Any, before: bool, extension: Any) -> Any:
    extension.invoke_before_training = bool(before)
    return decorator(extension)


def warn(message: str) -> None:
    """Give a DeprecationWarning for the line outside Chainer that made the call."""
    frame, level = sys._getframe(), 1
    while frame.f_back and (
            frame.f_globals.get('__name__', '').split('.')[0] in _LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, DeprecationWarning, stacklevel=level)
