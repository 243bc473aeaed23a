"""Softmax, its gradient and its logarithm, with one pass over memory each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from chainer.functions.activation.softmax import Softmax, _SoftmaxGrad

from chainer_compat.pytorch.tensors import memory_format
from chainer_compat.pytorch.tensors.arrays import array, tensor, tensors
from chainer_compat.pytorch.unsupported import Unsupported


def softmax(f: Softmax, inputs: tuple[np.ndarray]) -> tuple[np.ndarray]:
    """Return the softmax along an axis."""
    y = _along(f.axis, torch.softmax, tensor(inputs[0], channels_last=True))
    f.retain_outputs((0,))
    return y,


def softmax_gradient(f: _SoftmaxGrad, inputs: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray]:
    """Return the gradient of the input of softmax."""
    y, gy = tensors(*inputs, channels_last=True)
    gx = _along(f.axis, _gradient, y, memory_format.like(gy, y))
    f.retain_inputs((0, 1))
    return gx,


def log_softmax(x: np.ndarray, axis: int = 1) -> np.ndarray:
    """Return the logarithm of the softmax along an axis."""
    return _along(axis, torch.log_softmax, tensor(x, channels_last=True))


def _gradient(y: torch.Tensor, gy: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.ops.aten._softmax_backward_data(gy, y, axis, y.dtype)


def _along(axis: int, function: Callable[..., torch.Tensor], *xs: torch.Tensor) -> np.ndarray:
    """Call a function along an axis, with contiguous tensors, and return the result as an array.

    Images with channels last are contiguous if the channels are moved to the last axis.
    """
    x = xs[0]
    if not x.shape[axis]:  # there is no maximum
        raise Unsupported
    if axis % x.ndim == 1 and memory_format.of(x) is torch.channels_last:
        y = function(*[each.permute(0, 2, 3, 1) for each in xs], 3)
        return array(y.permute(0, 3, 1, 2))
    return array(function(*[each.contiguous() for each in xs], axis))
