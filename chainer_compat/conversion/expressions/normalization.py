"""Normalization by batch, layer, group, vector and neighboring channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as N

from chainer_compat.conversion.expressions.arrays import reshape


def batch_normalization(f: Any, x: Any, gamma: Any, beta: Any) -> Any:
    """``F.batch_norm(x, avg_mean, avg_var, gamma, beta, training, 1 - decay, eps)``."""
    running = f.running_mean, f.running_var
    training = True if running[0] is None else f.training
    return _normalized(f, x, running, gamma, beta, training, 1 - f.decay)


def fixed_batch_normalization(f: Any, x: Any, gamma: Any, beta: Any, mean: Any, var: Any) -> Any:
    """``F.batch_norm(x, avg_mean, avg_var, gamma, beta, False, eps=eps)``."""
    if f.known(3) is not None and f.known(4) is not None:
        return _normalized(f, x, (mean, var), gamma, beta, False, 0.)
    shape = tuple(1 if axis in f.axis else size for axis, size in enumerate(f.in_shapes[0]))
    mean, var, gamma, beta = (each.reshape(shape) for each in (mean, var, gamma, beta))
    return (x - mean) * (gamma * torch.rsqrt(var + float(f.eps))) + beta


def _normalized(f: Any, x: Any, statistics: tuple[Any, Any], gamma: Any, beta: Any,
                training: Any, momentum: float) -> Any:
    """Normalize, with the channels in the second axis as PyTorch needs them."""
    shape = f.in_shapes[0]
    axes = tuple(axis % len(shape) for axis in f.axis)
    keys = tuple(axis for axis in range(len(shape)) if axis not in axes)
    if keys == (1,):
        return N.batch_norm(x, statistics[0], statistics[1], gamma, beta, training, momentum,
                            float(f.eps))
    order = (*axes, *keys)
    y = x.permute(order)
    size = 1
    for axis in keys:
        size = size * shape[axis]
    mean, var = (None if each is None else each.view(-1) for each in statistics)
    y = N.batch_norm(
        y.reshape(-1, size), mean, var, gamma.reshape(-1), beta.reshape(-1), training, momentum,
        float(f.eps))
    y = reshape(y, tuple(shape[axis] for axis in order))
    return y.permute([order.index(axis) for axis in range(len(order))])


def batch_renormalization(f: Any, x: Any, gamma: Any, beta: Any) -> Any:
    """The definition: PyTorch has no batch renormalization. Running statistics are updated."""
    ndim, own = len(f.in_shapes[0]), len(f.in_shapes[1])
    axes = (0, *range(own + 1, ndim))

    def wide(value: Any) -> Any:
        return value.reshape((1, *f.in_shapes[1], *[1] * (ndim - own - 1)))

    running_mean, running_var = f._running_mean, f._running_var
    mean = x.mean(axes)
    var = ((x - wide(mean)) ** 2).mean(axes)
    std = torch.sqrt(var + f.eps)
    sigma = torch.sqrt(running_var.clone() + f.eps)
    r = torch.clamp(std / sigma, 1. / f.rmax, f.rmax).detach()
    d = torch.clamp((mean - running_mean.clone()) / sigma, -f.dmax, f.dmax).detach()
    y = wide(gamma) * ((x - wide(mean)) / wide(std) * wide(r) + wide(d)) + wide(beta)
    if not f.update_statistics:
        return y
    count = 1
    for axis in axes:
        count = count * f.in_shapes[0][axis]
    adjust = count / (count - 1)
    running_mean.mul_(f.decay).add_(mean.detach() * (1 - f.decay))
    running_var.mul_(f.decay).add_(var.detach() * ((1 - f.decay) * adjust))
    return y


def decorrelated(f: Any, x: Any) -> Any:
    """``projection @ (x - mean)`` for each group, with ``torch.linalg.eigh`` of the covariance."""
    shape = f.in_shapes[0]
    channels = x.transpose(0, 1).reshape(f.groups, shape[1] // f.groups, -1)
    count = 1
    for size in (shape[0], *shape[2:]):
        count = count * size
    mean = channels.mean(2, keepdim=True)
    centered = channels - mean
    size = shape[1] // f.groups
    covariance = torch.matmul(centered, centered.transpose(1, 2)) / count + f.constant(
        np.eye(size, dtype=f.in_dtypes[0]) * float(f.eps))
    values, vectors = (torch.linalg.eigh(covariance)[i] for i in range(2))
    projection = torch.matmul(vectors * (values ** -.5).unsqueeze(1), vectors.transpose(1, 2))
    if f.running_mean is not None:
        f.running_mean.mul_(f.decay).add_(mean.detach().squeeze(2) * (1 - f.decay))
    if f.running_projection is not None:
        f.running_projection.mul_(f.decay).add_(
            projection.detach() * ((1 - f.decay) * count / (count - 1)))
    y = torch.matmul(projection, centered)
    return reshape(y, (shape[1], shape[0], *shape[2:])).transpose(0, 1)


def fixed_decorrelated(f: Any, x: Any, mean: Any, projection: Any) -> Any:
    """``projection @ (x - mean)`` for each group of channels."""
    shape = f.in_shapes[0]
    channels = x.transpose(0, 1).reshape(f.groups, shape[1] // f.groups, -1)
    y = torch.matmul(projection, channels - mean.unsqueeze(2))
    return reshape(y, (shape[1], shape[0], *shape[2:])).transpose(0, 1)


def normalize_l2(f: Any, x: Any) -> Any:
    """``x / (x.square().sum(axis).sqrt() + eps)``: ``F.normalize`` uses ``max``."""
    norm = torch.sqrt(torch.square(x).sum(f.axis, keepdim=True)) + float(f.eps)
    return x / norm


def local_response_normalization(f: Any, x: Any) -> Any:
    """``F.local_response_norm(x, n, alpha * n, beta, k)``: PyTorch divides ``alpha`` by ``n``."""
    n = f.n // 2 * 2 + 1  # Chainer's window is symmetric
    return N.local_response_norm(x, n, f.alpha * n, f.beta, float(f.k))


EXPRESSIONS: dict[str, Callable[..., Any]] = {
    'normalization.batch_normalization.BatchNormalization': batch_normalization,
    'normalization.batch_normalization.FixedBatchNormalization': fixed_batch_normalization,
    'normalization.batch_renormalization.BatchRenormalizationFunction': batch_renormalization,
    'normalization.decorrelated_batch_normalization.DecorrelatedBatchNormalization': decorrelated,
    'normalization.decorrelated_batch_normalization.FixedDecorrelatedBatchNormalization':
        fixed_decorrelated,
    'normalization.group_normalization.GroupNormalization':
        lambda f, x, gamma, beta: N.group_norm(x, f.groups, gamma, beta, float(f.eps)),
    'normalization.l2_normalization.NormalizeL2': normalize_l2,
    'normalization.layer_normalization.LayerNormalization':
        lambda f, x, gamma, beta: N.layer_norm(x, f.in_shapes[1], gamma, beta, float(f.eps)),
    'normalization.local_response_normalization.LocalResponseNormalization':
        local_response_normalization,
}
