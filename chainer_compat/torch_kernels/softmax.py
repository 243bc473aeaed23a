"""Softmax, its gradient and its logarithm: one pass over the memory each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from chainer import FunctionNode
from chainer.functions.activation.log_softmax import LogSoftmax
from chainer.functions.activation.softmax import Softmax, _SoftmaxGrad
from chainer.functions.loss.softmax_cross_entropy import SoftmaxCrossEntropy

from chainer_compat.torch_kernels import memory_format
from chainer_compat.torch_kernels.arrays import Expression, array, tensor, tensors
from chainer_compat.torch_kernels.dispatch import Unsupported
from chainer_compat.torch_kernels.gpu_arrays import DTYPES


def softmax(f: Softmax, inputs: tuple[np.ndarray]) -> tuple[np.ndarray]:
    """Return the softmax along an axis."""
    y = _along(f.axis, torch.softmax, tensor(inputs[0], channels_last=True))
    f.retain_outputs((0,))
    return y,


def recorded_softmax(f: Softmax, x: torch.Tensor) -> torch.Tensor:
    """Return the softmax along an axis."""
    if not x.shape[f.axis]:
        raise Unsupported
    f.retain_outputs((0,))
    return torch.softmax(x, f.axis)


def recorded_log_softmax(f: LogSoftmax, x: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the softmax along an axis."""
    if not x.shape[f.axis]:
        raise Unsupported
    f._x_xp, f._x_shape = np, tuple(x.shape)
    f._x_dtype = DTYPES[x.dtype]
    f.retain_outputs((0,))
    return torch.log_softmax(x, f.axis)


def recorded_cross_entropy(f: SoftmaxCrossEntropy, x: torch.Tensor, t: torch.Tensor
                           ) -> torch.Tensor:
    """Return the mean of the cross entropies."""
    if (f.class_weight is not None or x.ndim != 2 or t.ndim != 1 or len(t) != len(x)
            or not x.numel() or f.reduce != 'mean' or t.dtype.is_floating_point):
        raise Unsupported
    labels = t.long()
    low, high = (each.item() for each in torch.aminmax(labels))
    if high >= x.shape[1]:
        raise Unsupported
    log_y = torch.log_softmax(x, 1)
    count = len(labels)
    if low < 0:
        is_valid = labels != f.ignore_label
        valid = labels[is_valid]
        if (f.normalize and not len(valid)) or (len(valid) and valid.min() < 0) or not (
                log_y.detach().sum().isfinite()):
            raise Unsupported
        if f.normalize:
            count = len(valid)
    elif 0 <= f.ignore_label < x.shape[1]:
        raise Unsupported
    f._coeff = 1. / count
    f.retain_inputs((0, 1))
    return torch.nn.functional.nll_loss(
        log_y, labels, reduction='sum', ignore_index=f.ignore_label) * f._coeff


EXPRESSIONS: dict[type[FunctionNode], Expression] = {
    LogSoftmax: recorded_log_softmax, Softmax: recorded_softmax,
    SoftmaxCrossEntropy: recorded_cross_entropy}


def softmax_gradient(f: _SoftmaxGrad, inputs: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray]:
    """Return the gradient of the input of softmax."""
    y, gy = tensors(*inputs, channels_last=True)
    gx = _along(f.axis, _gradient, y, memory_format.like(gy, y))
    f.retain_inputs((0, 1))
    return gx,


def log_softmax(x: np.ndarray, axis: int = 1) -> np.ndarray:
    """Return the logarithm of ``x``'s softmax along an axis."""
    return _along(axis, torch.log_softmax, tensor(x, channels_last=True))


def _gradient(y: torch.Tensor, gy: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.ops.aten._softmax_backward_data(gy, y, axis, y.dtype)


def _along(axis: int, function: Callable[..., torch.Tensor], *xs: torch.Tensor) -> np.ndarray:
    """Return the array of a function of tensors and an axis, which needs contiguous tensors.

    Images with channels last are contiguous if their channels are the last axis.
    """
    x = xs[0]
    if not x.shape[axis]:  # there is no maximum
        raise Unsupported
    if axis % x.ndim == 1 and memory_format.of(x) is torch.channels_last:
        y = function(*[each.permute(0, 2, 3, 1) for each in xs], 3)
        return array(y.permute(0, 3, 1, 2))
    return array(function(*[each.contiguous() for each in xs], axis))
