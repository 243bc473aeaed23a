"""Normalization over batches, layers, groups, vectors and neighboring channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as N

from chainer_compat.pytorch.expressions.arrays import product, reshape
from chainer_compat.pytorch.kernels import batch_normalization as kernels
from chainer_compat.pytorch.tensors.arrays import Expression, check_floats
from chainer_compat.pytorch.unsupported import Unsupported


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
    """Normalize, with the channels moved to the second axis, as PyTorch requires."""
    shape = f.in_shapes[0]
    axes = tuple(axis % len(shape) for axis in f.axis)
    keys = tuple(axis for axis in range(len(shape)) if axis not in axes)
    if keys == (1,):
        return N.batch_norm(x, statistics[0], statistics[1], gamma, beta, training, momentum,
                            float(f.eps))
    order = (*axes, *keys)
    y = x.permute(order)
    size = product(shape[axis] for axis in keys)
    mean, var = (each if each is None or len(keys) == 1 else each.view(-1) for each in statistics)
    y = N.batch_norm(
        y.reshape(-1, size), mean, var, gamma.reshape(-1), beta.reshape(-1), training, momentum,
        float(f.eps))
    y = reshape(y, tuple(shape[axis] for axis in order))
    return y.permute([order.index(axis) for axis in range(len(order))])


def batch_renormalization(f: Any, x: Any, gamma: Any, beta: Any) -> Any:
    """``F.batch_norm(x, ...) * r + d``, with factors from batch and running statistics."""
    ndim, n_own = len(f.in_shapes[0]), len(f.in_shapes[1])
    axes = (0, *range(n_own + 1, ndim))

    def wide(value: Any) -> Any:
        return value.reshape((1, *f.in_shapes[1], *[1] * (ndim - n_own - 1)))

    running = f._running_mean, f._running_var
    std = torch.sqrt(x.var(axes, unbiased=False) + f.eps)
    sigma = torch.sqrt(x.new_tensor(f.eps) + running[1])  # reads x, so it is not precomputed
    r = torch.clamp(std / sigma, 1. / f.rmax, f.rmax).detach() - 1
    d = torch.clamp((x.mean(axes) - running[0]) / sigma, -f.dmax, f.dmax).detach()
    mean, var = (each if n_own == 1 else each.view(-1) for each in running)
    flat = N.batch_norm(x.flatten(1, n_own), mean, var, None, None, f.training,
                        1 - f.decay if f.update_statistics else 0., f.eps)
    y = reshape(flat, f.in_shapes[0])
    return wide(gamma) * (y + y * wide(r) * f.training + wide(d) * f.training) + wide(beta)


def decorrelated(f: Any, x: Any) -> Any:
    """``projection @ (x - mean)`` for each group, with ``torch.linalg.eigh`` of the covariance."""
    shape = f.in_shapes[0]
    channels = x.transpose(0, 1).reshape(f.groups, shape[1] // f.groups, -1)
    count = product((shape[0], *shape[2:]))
    mean = channels.mean(2, keepdim=True)
    centered = channels - mean
    size = shape[1] // f.groups
    covariance = torch.matmul(centered, centered.transpose(1, 2)) / count + f.constant(
        np.eye(size, dtype=f.in_dtypes[0]) * float(f.eps))
    values, vectors = (torch.linalg.eigh(covariance)[i] for i in range(2))
    projection = torch.matmul(vectors * (values ** -.5).unsqueeze(1), vectors.transpose(1, 2))
    if f.running_mean is not None:
        f.running_mean.lerp_(mean.detach().squeeze(2), 1 - f.decay)
    if f.running_projection is not None:
        adjusted = projection.detach() * (count / (count - 1))
        f.running_projection.lerp_(adjusted, 1 - f.decay)
    y = torch.matmul(projection, centered)
    return reshape(y, (shape[1], shape[0], *shape[2:])).transpose(0, 1)


def fixed_decorrelated(f: Any, x: Any, mean: Any, projection: Any) -> Any:
    """``projection @ (x - mean)`` for each group of channels."""
    shape = f.in_shapes[0]
    channels = x.transpose(0, 1).reshape(f.groups, shape[1] // f.groups, -1)
    y = torch.matmul(projection, channels - mean.unsqueeze(2))
    return reshape(y, (shape[1], shape[0], *shape[2:])).transpose(0, 1)


def normalize_l2(f: Any, x: Any) -> Any:
    """``x / (torch.linalg.vector_norm(x, 2, axis) + eps)``: ``F.normalize`` uses ``max``."""
    norm = torch.linalg.vector_norm(x, 2, f.axis, keepdim=True) + float(f.eps)
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


class _LayerNorm(torch.autograd.Function):
    """Layer normalization whose gradient, as in Chainer, recomputes the means and variances."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, eps: float
                ) -> torch.Tensor:
        ctx.save_for_backward(x, gamma, beta)
        ctx.eps = eps
        return torch.native_layer_norm(x, gamma.shape, gamma, beta, eps)[0]

    @staticmethod
    def backward(ctx: Any, gy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gamma, beta = ctx.saved_tensors
        _, mean, inv_std = torch.native_layer_norm(x, gamma.shape, None, None, ctx.eps)
        return *torch.ops.aten.native_layer_norm_backward(
            gy, x, gamma.shape, mean, inv_std, gamma, beta, ctx.needs_input_grad[:3]), None


def run_layer_normalization(f: Any, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor
                            ) -> torch.Tensor:
    """``F.layer_norm(x, (n,), gamma, beta, eps)``."""
    check_floats(x, gamma, beta)
    # With one element, the gradient of gamma is 0, but a rounding error in PyTorch.
    if x.ndim != 2 or len(x) == 0 or x.shape[1] < 2 or not (
            gamma.shape == beta.shape == x.shape[1:]):
        raise Unsupported
    y = _LayerNorm.apply(x.contiguous(), gamma, beta, float(f.eps))
    if not y.detach().sum().isfinite():  # PyTorch computes sums of squares, which can overflow
        raise Unsupported
    f.retain_inputs((0, 1))
    return y


RECORDED: dict[str, Expression] = {
    'normalization.batch_normalization.BatchNormalization': kernels.recorded,
    'normalization.layer_normalization.LayerNormalization': run_layer_normalization,
}
