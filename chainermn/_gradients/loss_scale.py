"""The loss scale of gradients, by which update rules divide them.

It may change at each step, so state that is kept for later steps excludes it.
"""
from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from chainermn._types import Array, Parameter


def unify(params: Iterable[Parameter], default: float | None = None) -> float | None:
    """Give all gradients the same loss scale and return it.

    The backward pass sets the scale of the parameters that the loss depends on. Other parameters
    have no scale on this rank, but their mean gradients contain the scale of the other ranks.

    Args:
        params: The parameters.
        default: The scale if no gradient has one.
    """
    initialized = [param for param in params if param.is_initialized]
    scales = [scale for param in initialized if param.grad is not None
              and (scale := getattr(param, '_loss_scale', None)) is not None]
    scale = float(scales[0]) if scales else default
    for param in initialized:
        current = getattr(param, '_loss_scale', None)
        if scale is not None and current != scale:
            if param.grad is not None:
                param.grad = param.grad.copy()
                param.grad *= param.dtype.type(scale / (current or 1))
            param._loss_scale = scale
    return scale


def without_scale(x: Array, scale: float) -> Array:
    """Return gradients divided by their loss scale, in float32 or float64."""
    y = x.astype(np.promote_types(x.dtype, np.float32))
    y /= y.dtype.type(scale)  # in place; otherwise, a 0-d array would become a scalar
    return y

