"""Dropout that keeps the memory format of its input."""

from __future__ import annotations

import numpy as np
from chainer.functions.noise.dropout import Dropout

from chainer_compat.pytorch.tensors.memory_format import is_channels_last
from chainer_compat.pytorch.unsupported import Unsupported


def output(f: Dropout, inputs: tuple[np.ndarray]) -> tuple[np.ndarray]:
    """Set random elements to zero, and scale the others."""
    x, = inputs
    if f.mask is not None or not is_channels_last(x):
        raise Unsupported
    f.mask = _mask(f, x)
    return x * f.mask,


def _mask(f: Dropout, x: np.ndarray) -> np.ndarray:
    """Draw the same numbers as Chainer, for an array in the memory format of ``x``."""
    is_used = np.random.rand(*x.shape) >= f.dropout_ratio
    scale = x.dtype.type(1 / (1 - f.dropout_ratio))
    return np.multiply(is_used, scale, out=np.empty_like(x))
