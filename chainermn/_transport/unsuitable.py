"""Advice for objects that are not NumPy or CuPy arrays."""
from __future__ import annotations

import chainer
import numpy as np

from chainermn._operations import call
from chainermn._operations.table import BY_NAME

#: Advice on how to convert an object to an array, by the package of its class.
_CONVERSIONS = {
    'torch': 'pass x.detach().cpu().numpy(), and convert the result with torch.from_numpy',
    'tensorflow': 'pass x.numpy()',
    'jax': 'pass numpy.asarray(x)',
    'jaxlib': 'pass numpy.asarray(x)',
    'chainerx': 'pass chainerx.to_numpy(x)',
    'scipy': 'pass x.toarray(), or use {objects}(x)',
    'pandas': 'pass x.to_numpy(), or use {objects}(x)',
}


def described(x: object) -> str:
    """Return the type of an object, and advice on a replacement."""
    if x is None:
        return 'None; pass an array'
    kind = f'{type(x).__module__}.{type(x).__qualname__}'.removeprefix('builtins.')
    if isinstance(x, chainer.Variable):
        return ('a chainer.Variable; pass its .array, or use chainermn.functions, whose results '
                'can be differentiated')
    advice = _CONVERSIONS.get(kind.partition('.')[0])
    if advice is None:
        if isinstance(x, (list, tuple, int, float, complex)) or hasattr(x, '__array__'):
            advice = 'pass numpy.asarray(x), or use {objects}(x)'
        else:
            advice = 'for other objects, use {objects}'
    return f'{kind}; {advice.format(objects=_object_operation())}'


def advice_for(dtype: np.dtype) -> str:
    """Return advice for an error about an array whose dtype cannot be sent."""
    if dtype.names is not None:
        return (f'. Send each field, such as x[{dtype.names[0]!r}], or use '
                f'{_object_operation()}(x)')
    if dtype.kind in 'OSUmM':
        return f'. Use {_object_operation()}(x)'
    return ''


def _object_operation() -> str:
    """Return the name of the operation for objects that corresponds to the current operation."""
    name = call.outermost().removeprefix('i')
    name = 'allreduce' if name in ('reduce', 'allreduce_many', 'multi_node_mean') else name
    return f'{name}_obj' if f'{name}_obj' in BY_NAME else 'an object operation, such as bcast_obj'
