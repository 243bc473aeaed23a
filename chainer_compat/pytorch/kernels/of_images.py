"""Dropout, sums and means of images with channels last, in this memory format.

NumPy would sum such images pixel by pixel, which is slower and less accurate than for contiguous
images.
"""

from __future__ import annotations

import numpy as np
import torch
from chainer.functions.math.average import Mean
from chainer.functions.math.sum import Sum
from chainer.functions.noise.dropout import Dropout

from chainer_compat.pytorch.tensors.arrays import array, tensor
from chainer_compat.pytorch.tensors.memory_format import is_channels_last
from chainer_compat.pytorch.unsupported import Unsupported


def dropout(f: Dropout, inputs: tuple[np.ndarray]) -> tuple[np.ndarray]:
    """Set random elements to zero and scale the others, with the same numbers as Chainer."""
    x, = inputs
    if f.mask is not None or not is_channels_last(x):
        raise Unsupported
    is_used = np.random.rand(*x.shape) >= f.dropout_ratio
    scale = x.dtype.type(1 / (1 - f.dropout_ratio))
    f.mask = np.multiply(is_used, scale, out=np.empty_like(x))
    return x * f.mask,


def total(f: Sum, inputs: tuple[np.ndarray]) -> tuple[np.ndarray]:
    """Return the sum over some or all axes."""
    return array(torch.sum(_images(inputs[0]), _axes(f), keepdim=bool(f.keepdims))),


def mean(f: Mean, inputs: tuple[np.ndarray]) -> tuple[np.ndarray]:
    """Return the mean over some or all axes."""
    x = _images(inputs[0])
    y = torch.mean(x, _axes(f), keepdim=bool(f.keepdims))
    f.multiplier = y.numel() / x.numel()
    return array(y),


def _images(x: np.ndarray) -> torch.Tensor:
    if not isinstance(x, np.ndarray) or x.dtype != np.float32 or x.size == 0 or (
            x.flags.c_contiguous or not is_channels_last(x)):
        raise Unsupported
    return tensor(x, channels_last=True)


def _axes(f: Sum | Mean) -> tuple[int, ...]:
    axes = range(4) if f.axis is None else f.axis
    if not axes:  # PyTorch would sum all elements
        raise Unsupported
    return tuple(axes)
