"""Names of Chainer 1 to 6 that Chainer 7.8.1 does not have: modules, classes, methods.

Module attributes are looked up on first use. Each line that uses an old name gets a
DeprecationWarning that gives the current name.
"""

import functools
import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

from chainer_compat.dialect import old_helpers
from chainer_compat.dialect.old_arguments import warn, with_old_arguments
from chainer_compat.patching.registry import edit, moved, patch

moved.update({
    'chainer.flag': 'chainer_compat.dialect.flag',
    'chainer.function_set': 'chainer_compat.dialect.function_set',
    'chainer.functions.caffe': 'chainer.links.caffe',
    'chainer.functions.math.squared_difference': 'chainer.functions.loss.squared_error',
    'chainer.functions.pooling.max_pooling_2d': 'chainer.functions.pooling.max_pooling_nd',
    'chainer.training.triggers.interval': 'chainer.training.triggers.interval_trigger',
    **{f'chainer.functions.{old}': f'chainer.functions.rnn.{old.split(".")[1]}' for old in (
        'activation.lstm', 'activation.slstm', 'activation.tree_lstm', 'connection.n_step_gru',
        'connection.n_step_lstm', 'connection.n_step_rnn')},
    **{f'chainer.links.connection.{name}': f'chainer.links.rnn.{name}' for name in (
        'gru', 'lstm', 'mgu', 'n_step_gru', 'n_step_lstm', 'n_step_rnn', 'peephole', 'tree_lstm',
        'zoneoutlstm')},
})


def init(device: Any = None) -> None:
    """Raise an error if CUDA is not available."""
    from chainer.backends import cuda

    cuda.check_cuda_available()


def allocate(name: str, like: Any, *args: Any, dtype: Any = 'float32', stream: None = None) -> Any:
    """Call a CuPy function with the arguments that it had in ``chainer.cuda``."""
    init()
    import cupy

    n_values = int(name.startswith('full'))
    if name.endswith('_like'):
        like, dtype = like.shape, like.dtype
    elif len(args) > n_values:
        dtype = args[n_values]
    return getattr(cupy, name.removesuffix('_like'))(like, *args[:n_values], dtype=dtype)


def batch_normalization_function(*args: Any, **kwargs: Any) -> Any:
    """Create an object of a class that is imported on first use, because it needs Chainer."""
    from chainer_compat.dialect.batch_normalization_function import BatchNormalizationFunction

    return BatchNormalizationFunction(*args, **kwargs)


def init_weight(weights: Any, initializer: Any, scale: float = 1.) -> None:
    """Initialize an array, or the array of a parameter, then multiply it by ``scale``."""
    from chainer import initializers

    weights = getattr(weights, 'array', weights)
    initializers._get_initializer(initializer)(weights)
    weights *= scale


class MaxPooling2D(str):
    """The class ``F.MaxPooling2D``, which other functions also accept as ``pooling``."""

    __name__ = 'MaxPooling2D'

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a function that pools."""
        from chainer.functions.pooling.max_pooling_nd import MaxPoolingND

        node = _with_use_cudnn(MaxPoolingND)(2, *args, **kwargs)
        (node.kh, node.kw), (node.sy, node.sx), (node.ph, node.pw) = (
            node.ksize, node.stride, node.pad)
        return node


#: The current path; or a replacement as text for the warning, and an equivalent object.
Row = str | tuple[str, Any]

_CUSTOM = 'a custom function'
_CUDNN_TYPES: dict[str, Row] = {
    '_check_cudnn_acceptable_type': (_CUSTOM, old_helpers.have_one_dtype)}
_SQUARES: dict[str, Row] = {'_sum_sqnorm': (_CUSTOM, old_helpers.sum_of_squares)}
_PAIR: dict[str, Row] = {'_pair': 'chainer.functions.connection.convolution_2d._pair'}

NAMES: dict[str, dict[str, Row]] = {
    'chainer': {
        'AUTO': 'chainer.flag.AUTO', 'Flag': 'chainer.flag.Flag', 'OFF': 'chainer.flag.OFF',
        'ON': 'chainer.flag.ON', 'FunctionSet': 'chainer.function_set.FunctionSet',
        'init_weight': ('an initializer', init_weight)},
    'chainer.backends.cuda': {
        'init': ('check_cuda_available()', init),
        **{name: (f'cupy.{name}', functools.partial(allocate, name)) for name in (
            'empty', 'empty_like', 'full', 'full_like', 'ones', 'ones_like', 'zeros',
            'zeros_like')}},
    'chainer.functions': {
        'MaxPooling2D': ('chainer.functions.max_pooling_2d', MaxPooling2D('max')),
        **{name: f'chainer.links.{name}' for name in (
            'BatchNormalization', 'Bilinear', 'BinaryHierarchicalSoftmax', 'Convolution2D',
            'DilatedConvolution2D', 'EmbedID', 'Inception', 'InceptionBN', 'Linear',
            'NegativeSampling', 'PReLU', 'Parameter')}},
    'chainer.datasets.mnist': {
        '_make_npz': 'chainer.datasets._mnist_helper.make_npz',
        '_preprocess_mnist': 'chainer.datasets._mnist_helper.preprocess_mnist'},
    'chainer.functions.array.broadcast': {
        '_backward_one': ('chainer.functions.sum_to', old_helpers.sum_to_shape)},
    **{f'chainer.functions.{path}': {**names} for path, names in {
        'connection.convolution_2d': _CUDNN_TYPES, 'connection.convolution_nd': _CUDNN_TYPES,
        'connection.deconvolution_2d': _CUDNN_TYPES, 'connection.deconvolution_nd': _CUDNN_TYPES,
        'connection.depthwise_convolution_2d': _PAIR,
        'connection.dilated_convolution_2d': _PAIR | _CUDNN_TYPES,
        'pooling.pooling_2d': _CUDNN_TYPES, 'pooling.pooling_nd': _CUDNN_TYPES}.items()},
    'chainer.functions.connection.linear': {'_as_mat': (_CUSTOM, old_helpers.rows)},
    'chainer.functions.math.basic_math': {
        '_check_constant_type': (_CUSTOM, old_helpers.check_constant)},
    'chainer.functions.normalization.batch_normalization': {
        'BatchNormalizationFunction': (
            'chainer.functions.batch_normalization', batch_normalization_function),
        '_xhat': (_CUSTOM, old_helpers.normalized)},
    'chainer.functions.pooling.max_pooling_nd': {
        'MaxPooling2D': ('chainer.functions.max_pooling_2d', MaxPooling2D('max'))},
    'chainer.gradient_check': {
        'numerical_grad_cpu': 'chainer.gradient_check.numerical_grad',
        'numerical_grad_gpu': 'chainer.gradient_check.numerical_grad'},
    'chainer.initializers': {'init_weight': ('an initializer', init_weight)},
    'chainer.links': {},
    'chainer.training.extensions.computational_graph': {
        'dump_graph': 'chainer.training.extensions.DumpGraph'},
    'chainer.optimizer': {
        'exponential_decay_noise':
            'chainer.optimizer_hooks.gradient_noise.exponential_decay_noise', **_SQUARES},
    'chainer.optimizer_hooks.gradient_clipping': {**_SQUARES},
    'chainer.utils.type_check': {'argname': 'chainer.utils.type_check._argname'},
}


@patch(*NAMES)
def old_names(module: ModuleType) -> None:
    """All versions: names of Chainer 1 to 6, such as ``chainer.FunctionSet``, work again.

    Chainer 7.8.1 moved or removed them.
    """
    vars(module)['__getattr__'] = functools.partial(_look_up, module.__name__)


def _look_up(module: str, name: str) -> Any:
    """Return a name that ``module`` had in an old version."""
    if f'{module}.{name}' in moved:
        return importlib.import_module(f'{module}.{name}')
    path = NAMES[module].get(name) or _search(module, name)
    if not path:
        raise AttributeError(f'module {module!r} has no attribute {name!r}')
    now, found = (path, None) if isinstance(path, str) else path
    if now.rpartition('.')[0] not in moved:  # their objects warn when they are used
        warn(f'{module}.{name} is a name of an old version of Chainer: use {now}.')
    if found is not None or now in sys.modules:
        return found or sys.modules[now]
    owner, _, attribute = now.rpartition('.')
    found = getattr(importlib.import_module(owner), attribute)
    return _with_use_cudnn(found) if hasattr(found, 'apply') else found


@functools.cache
def _with_use_cudnn(cls: Any) -> Any:
    cls.__init__ = with_old_arguments(cls.__init__, sys.maxsize, ['use_cudnn'])
    return cls


def _search(package: str, name: str) -> str:
    """Return the path of a module below ``package``, or of a class in one of them."""
    if name.startswith('_') or package not in ('chainer.functions', 'chainer.links'):
        return ''
    for path, module in sys.modules.copy().items():
        if path.startswith(f'{package}.'):
            cls = vars(module).get(name)
            if isinstance(cls, type) and cls.__module__ == path:
                return f'{path}.{name}'
            if path.endswith(f'.{name}'):
                return path
    return ''


@patch('chainer.function_node')
def called_functions(module: ModuleType) -> None:
    """All versions: objects of classes such as ``F.Sigmoid`` can be called again.

    Calling them raised an error about the method ``apply``.
    """
    module.FunctionNode.__call__ = _apply


def _apply(function: Any, *inputs: Any) -> Any:
    warn(f'{function.label} is a class of Chainer 1: use the function in chainer.functions.')
    outputs = function.apply(inputs)
    return outputs[0] if len(outputs) == 1 else outputs


@patch('chainer.function_node')
def backward_of_old_subclasses(module: ModuleType) -> None:
    """All versions: ``backward_cpu`` in a class derived from a Chainer function was not called.

    Chainer 1 and 2 called it. Since version 3, ``backward`` of the Chainer function computes the
    gradients, which are then wrong. Now there is a warning. For example, a class of
    chainer-speech-recognition derives from Convolution2DFunction.
    """
    node: Any = module.FunctionNode

    def init_subclass(cls: type[Any], /, **options: Any) -> None:
        super(node, cls).__init_subclass__(**options)
        _warn_of_backward(cls)

    node.__init_subclass__ = classmethod(init_subclass)


def _warn_of_backward(cls: Any) -> None:
    old = [name for name in ('backward_cpu', 'backward_gpu') if name in vars(cls)]
    if old and 'backward' not in vars(cls) and not cls.__module__.startswith('chainer.'):
        warnings.warn(
            f'{cls.__name__}.{old[0]} is never called: since Chainer 3, gradients are computed by '
            f'{cls.__base__.__name__}.backward(indexes, grad_outputs). Override that method, or '
            'derive from chainer.Function.', stacklevel=3)


@edit('chainer.function_node')
def evaluated_type_checks() -> dict[str, str]:
    """All versions: type checks of custom functions can use ``in_types.size().eval()`` again.

    Chainer 7.8.1 first checks with numbers, which have no ``eval``, instead of expressions. With
    ``type_check.Variable(numpy.prod, 'prod')``, the check got expressions where it expected
    numbers.
    """
    return {'except type_check.InvalidType:': 'except Exception:'}


@patch('chainer.variable')
def hash_of_variable(module: ModuleType) -> None:
    """All versions: variables can be set members and dictionary keys, as in Chainer 1 and 2.

    Chainer 7.8.1 raised TypeError.
    """
    variable: Any = module.Variable

    def by_identity(self: Any) -> int:
        warn('Since Chainer 3, Variables are not hashable: use id(variable).')
        return object.__hash__(self)

    variable.__hash__ = by_identity


@edit('chainer.function_node')
def type_checks_turned_off() -> dict[str, str]:
    """All versions: ``type_check_enable = False`` of Function turns off its type checks, as before.

    Chainer 7.8.1 ignored it and raised InvalidType. Code written for Chainer 1 sets it in a custom
    class, or in ``chainer.Function`` for all functions.
    """
    return {'# Ignore errors on first run\n            pass':
            'from chainer_compat.dialect.old_names import is_unchecked\n'
            '            if is_unchecked(self): return'}


@patch('chainer.function')
def type_check_enable(module: ModuleType) -> None:
    """All versions: user code can read ``Function.type_check_enable`` to restore it later."""
    module.Function.type_check_enable = True


def is_unchecked(node: Any) -> bool:
    """Return whether user code has turned off the type checks of a function."""
    from chainer import Function
    from chainer.function import FunctionAdapter

    function: Any = node.function if isinstance(node, FunctionAdapter) else node
    enabled: bool = (Function.type_check_enable
                     and getattr(function, 'type_check_enable', True))
    if not enabled:
        warn("type_check_enable is an attribute of Chainer 1: use "
             "chainer.using_config('type_check', False).")
    return not enabled
