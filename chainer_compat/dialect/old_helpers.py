"""Private functions of Chainer 1 to 6 that existing programs imported for custom functions.

``old_names`` finds them under their old paths.
"""

from collections.abc import Iterable
from typing import Any


def rows(x: Any) -> Any:
    """Return an array as a matrix, as in ``functions.connection.linear._as_mat``."""
    return x if x.ndim == 2 else x.reshape(len(x), -1)


def sum_to_shape(*args: Any) -> Any:
    """Return a gradient, summed over the axes that were broadcast.

    Same as ``functions.array.broadcast._backward_one``. In Chainer 1 and 2, its arguments were
    ``(xp, shape, dtype, g)`` with arrays; in Chainer 3 and 4, ``(g, shape)`` with variables.
    """
    from chainer.functions.math import sum as sum_module

    if len(args) == 2:
        g, shape = args
        return sum_module.sum_to(g, shape)
    xp, shape, dtype, g = args
    return xp.zeros(shape, dtype) if g is None else sum_module.sum_to(g, shape).array


def sum_of_squares(arrays: Iterable[Any]) -> float:
    """Return the sum of the squares of all elements, as in ``optimizer._sum_sqnorm``."""
    return float(sum(float(x.ravel().dot(x.ravel())) for x in arrays))


def normalized(x: Any, mean: Any, std: Any, expander: Any) -> Any:
    """Normalize an array, as in ``functions.normalization.batch_normalization._xhat``."""
    return (x - mean[expander]) / std[expander]


def check_constant(value: Any) -> None:
    """Reject everything but numbers and arrays, like ``basic_math._check_constant_type``.

    Raises:
        TypeError: If ``value`` is neither a number nor an array.
    """
    import chainer
    import numpy as np

    if not np.isscalar(value) and not isinstance(value, chainer.get_array_types()):
        raise TypeError(f'Expected a number or an array, but got {type(value).__name__}.')


def have_one_dtype(x: Any, w: Any) -> bool:
    """Return whether cuDNN accepts two dtypes, like ``_check_cudnn_acceptable_type``."""
    return bool(x == w)
