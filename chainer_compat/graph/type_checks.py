"""Type checks of function inputs, once per signature.

``check_type_forward`` of most functions depends only on the shapes and dtypes of the inputs, and on
a few attributes of the function. Once it has accepted inputs, it is not called again for inputs
with the same signature.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import chainer
from chainer import FunctionNode

Array: TypeAlias = Any  # of NumPy or CuPy
Check: TypeAlias = Any  # the function ``check_type_forward`` of a class

#: By class in ``chainer.functions``: the attributes that ``check_type_forward`` reads.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    'activation.elu.ELU': (),
    'activation.leaky_relu.LeakyReLU': (),
    'activation.log_softmax.LogSoftmax': ('axis',),
    'activation.relu.ReLU': (),
    'activation.sigmoid.Sigmoid': (),
    'activation.softmax.Softmax': ('axis',),
    'activation.softplus.Softplus': (),
    'activation.tanh.Tanh': (),
    'array.concat.Concat': ('axis',),
    'array.expand_dims.ExpandDims': ('axis',),
    'array.get_item.GetItem': (),
    'array.reshape.Reshape': ('shape', '_cnt'),
    'array.rollaxis.Rollaxis': ('axis', 'start'),
    'array.separate.Separate': ('axis',),
    'array.squeeze.Squeeze': ('axis',),
    'array.stack.Stack': ('axis',),
    'array.swapaxes.Swapaxes': ('axis1', 'axis2'),
    'array.tile.Tile': (),
    'array.transpose.Transpose': (),
    'connection.convolution_2d.Convolution2DFunction': ('groups',),
    'connection.deconvolution_2d.Deconvolution2DFunction': (
        'dx', 'dy', 'outh', 'outw', 'ph', 'pw', 'sx', 'sy'),
    'connection.embed_id.EmbedIDFunction': (),
    'connection.linear.LinearFunction': (),
    'loss.absolute_error.AbsoluteError': (),
    'loss.huber_loss.HuberLoss': (),
    'loss.mean_absolute_error.MeanAbsoluteError': (),
    'loss.mean_squared_error.MeanSquaredError': (),
    'loss.squared_error.SquaredError': (),
    'math.average.Mean': ('axis',),
    'math.basic_math.Absolute': (),
    'math.basic_math.Add': (),
    'math.basic_math.AddConstant': (),
    'math.basic_math.Div': (),
    'math.basic_math.DivFromConstant': (),
    'math.basic_math.Mul': (),
    'math.basic_math.MulConstant': (),
    'math.basic_math.Neg': (),
    'math.basic_math.PowVarConst': (),
    'math.basic_math.Sub': (),
    'math.basic_math.SubFromConstant': (),
    'math.exponential.Exp': (),
    'math.exponential.Log': (),
    'math.linear_interpolate.LinearInterpolate': (),
    'math.logarithm_1p.Log1p': (),
    'math.matmul.MatMul': ('transa', 'transb'),
    'math.sqrt.Sqrt': (),
    'math.square.Square': (),
    'math.sum.Sum': ('axis',),
    'noise.dropout.Dropout': (),
    'normalization.batch_normalization.BatchNormalization': ('axis',),
    'normalization.layer_normalization.LayerNormalization': (),
    'pooling.average_pooling_2d.AveragePooling2D': (),
    'pooling.max_pooling_nd.MaxPoolingND': ('ndim',),
    'rnn.lstm.LSTM': (),
}

#: Types whose values can be compared with ``==``.
_SIMPLE = frozenset({bool, int, str, type(None)})

#: Above this number of signatures, the cache is cleared.
_LIMIT = 4096

_base = FunctionNode._check_data_type_forward
_nothing = FunctionNode.check_type_forward
#: Contains only Chainer's classes: user classes may refer to arrays and must be freed.
_checks: dict[type, tuple[Check, tuple[str, ...]]] = {}
_accepted: set[Hashable] = set()


def check(function: FunctionNode, arrays: Sequence[Array],
          variables: Sequence[chainer.Variable] | None = None) -> None:
    """Check the types of the inputs, unless inputs with the same signature have been accepted.

    Args:
        function: The function. User code must not have replaced its methods.
        arrays: Its inputs without memory layouts, or objects with the same shapes and dtypes.
        variables: The inputs, if they are not arrays.
    """
    cls = type(function)
    if cls.check_type_forward is _nothing and cls._check_data_type_forward is _base:
        return
    signature = _signature(cls, function, arrays)
    if signature is None or signature not in _accepted:
        function._check_data_type_forward(
            arrays if variables is None else tuple([x._data[0] for x in variables]))
    if signature is not None and signature not in _accepted:
        if len(_accepted) >= _LIMIT:
            _accepted.clear()
        _accepted.add(signature)


def attributes_of(cls: type[FunctionNode]) -> tuple[str, ...] | None:
    """Return the attributes on which the type check of a class depends, besides the inputs.

    The result is ``None`` if the attributes are unknown or not hashable.
    """
    if cls.check_type_forward is _nothing:
        return ()
    known = _known(cls)
    return None if known is None or 'shape' in known[1] else known[1]


def check_signature(function: FunctionNode, signature: Hashable,
                    variables: Sequence[chainer.Variable]) -> None:
    """Check the types of the inputs, unless inputs with the same signature have been accepted."""
    try:
        if signature in _accepted:
            return
    except TypeError:  # an unhashable option, such as an array as axis
        function._check_data_type_forward(tuple([x._data[0] for x in variables]))
        return
    function._check_data_type_forward(tuple([x._data[0] for x in variables]))
    if len(_accepted) >= _LIMIT:
        _accepted.clear()
    _accepted.add(signature)


def _signature(cls: type[FunctionNode], function: FunctionNode, arrays: Sequence[Array]
               ) -> Hashable | None:
    """Return the signature that the check depends on; ``None`` if it is unknown."""
    known = _checks.get(cls)
    if known is None:
        known = _known(cls)
        if known is None:
            return None
        _checks[cls] = known
    if cls.check_type_forward is not known[0] or cls._check_data_type_forward is not _base:
        return None
    signature: list[Any] = [cls]
    for name in known[1]:
        value = getattr(function, name)
        if type(value) is tuple:
            if not _SIMPLE.issuperset(map(type, value)):
                return None
        elif type(value) not in _SIMPLE:
            return None
        signature.append(value)
    for array in arrays:
        signature += array.dtype, array.shape
    return tuple(signature)


def _known(cls: type[FunctionNode]) -> tuple[Check, tuple[str, ...]] | None:
    """Return the type check of a Chainer class, and the attributes that it reads."""
    if not cls.__module__.startswith('chainer.functions.'):
        return None
    name = f'{cls.__module__}.{cls.__qualname__}'.removeprefix('chainer.functions.')
    check = cls.check_type_forward
    if name not in ATTRIBUTES or not check.__module__.startswith('chainer.functions.'):
        return None
    return check, ATTRIBUTES[name]
