"""The loss scale of gradients, by which update rules divide them.

It may change at each step, so what is kept for later steps is kept without it.
"""
from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from chainermn._types import Array, Parameter

if TYPE_CHECKING:
    from chainermn._transport.base import Compressor


def unify(params: Iterable[Parameter], default: float | None = None) -> float | None:
    """Give all gradients the same loss scale, and return it.

    Backward sets the scale of the parameters that the loss used.  A rank has no scale for the
    others, but their mean gradients have that of the other ranks.

    Args:
        params: Parameters.
        default: The scale if no gradient has one.
    """
    initialized = [param for param in params if param.is_initialized]
    scales = [scale for param in initialized if param.grad is not None
              and (scale := getattr(param, '_loss_scale', None)) is not None]
    scale = float(scales[0]) if scales else default
    for param in initialized:
        own = getattr(param, '_loss_scale', None)
        if scale is not None and own != scale:
            if param.grad is not None:
                param.grad = param.grad.copy()
                param.grad *= param.dtype.type(scale / (own or 1))
            param._loss_scale = scale
    return scale


def without_scale(x: Array, scale: float) -> Array:
    """Return gradients divided by their loss scale, in float32 or float64."""
    y = x.astype(np.promote_types(x.dtype, np.float32))
    y /= y.dtype.type(scale)  # in place, or an array without axes would become a number
    return y


def compress(compressor: Compressor, x: Array, key: Hashable, scale: float | None) -> Array:
    """Encode gradients without their loss scale."""
    return compressor.compress(x if scale is None else without_scale(x, scale), key)


def decompress(compressor: Compressor, encoded: Array, size: int, dtype: np.dtype,
               scale: float | None) -> Array:
    """Decode gradients, and multiply them by the loss scale."""
    if scale is None:
        return compressor.decompress(encoded, size, dtype)
    x = compressor.decompress(encoded, size, np.promote_types(dtype, np.float32))
    with np.errstate(over='ignore'):
        return (x * x.dtype.type(scale)).astype(dtype, copy=False)
