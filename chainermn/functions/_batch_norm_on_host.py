"""The arithmetic of multi-node batch normalization on NumPy arrays.

If PyTorch is installed, it does the computation, as it does for Chainer's functions.
"""
from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from chainer_compat.pytorch.dispatch import with_kernel
from chainermn._types import Array

#: An index that inserts axes of length one, so that a per-channel array broadcasts against the
#: input.
Expander = tuple[slice | None, ...]


@with_kernel('batch_normalization.statistics')
def statistics(x: Array, axis: tuple[int, ...], expander: Expander, dtype: np.dtype) -> Array:
    """Return the number of elements per channel, the means and the variances, as a flat array."""
    count = prod(x.shape[i] for i in axis)
    if count:
        mean, var = x.mean(axis=axis, dtype=dtype), x.var(axis=axis, dtype=dtype)
    else:
        shape = tuple(n for i, n in enumerate(x.shape) if i not in axis)
        mean, var = np.zeros(shape, dtype), np.zeros(shape, dtype)
    return np.concatenate([np.full(1, count, dtype), mean.ravel(), var.ravel()])


def table(parts: Sequence[Array]) -> Array:
    """Return the statistics, one rank per row."""
    return np.stack(parts)


def merge(table: Array, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Array, Array, Array]:
    """Merge the statistics of several ranks, one rank per row.

    Returns:
        The means, the variances, and the number of elements per channel.
    """
    weights = table[:, :1] / table[:, :1].sum()
    means, variances = np.split(table[:, 1:], 2, axis=1)
    merged = (weights * means).sum(axis=0)
    spread = (weights * (variances + (means - merged) ** 2)).sum(axis=0)
    return (merged.reshape(shape).astype(dtype), spread.reshape(shape).astype(dtype),
            table[:, 0].sum())


def update_averages(running_mean: Array, running_var: Array, mean: Array, var: Array, total: Array,
                    decay: float) -> None:
    """Update the moving averages in place; the variance is the unbiased one, as in Chainer."""
    unbiased = var * (total / max(total - 1, 1))
    for average, value in (running_mean, mean), (running_var, unbiased):
        average *= decay
        average += (1 - decay) * value


@with_kernel('batch_normalization.gradient_sums')
def gradient_sums(gy: Array, x: Array, axis: tuple[int, ...], expander: Expander, mean: Array,
                  inv_std: Array, dtype: np.dtype) -> Array:
    """Return the gradients of beta and gamma, stacked in this order."""
    x_hat = (x - mean[expander]) * inv_std[expander]
    return np.stack([gy.sum(axis=axis, dtype=dtype), (gy * x_hat).sum(axis=axis, dtype=dtype)])


@with_kernel('batch_normalization.input_gradient')
def input_gradient(gy: Array, x: Array, expander: Expander, mean: Array, inv_std: Array,
                   gamma: Array, sums: Array, total: Array) -> Array:
    """Return the gradient of the input, given the sums of the gradients over all ranks."""
    gbeta, ggamma = sums
    x_hat = (x - mean[expander]) * inv_std[expander]
    gx = (gamma * inv_std)[expander] * (
        gy - (x_hat * ggamma[expander] + gbeta[expander]) / total)
    return gx.astype(x.dtype, copy=False)
