"""The arithmetic of multi-node batch normalization on CuPy arrays: few kernels, no temporaries.

Defines the same functions as ``_batch_norm_on_host``. In the kernels, ``W`` is the dtype of the
statistics: float32 or wider.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod

import numpy as np

from chainermn._types import Array, DeviceArray, Kernel
from chainermn.functions._batch_norm_on_host import Expander

#: Kernels by name: the class (ElementwiseKernel or ReductionKernel), inputs, outputs and
#: expressions.
KERNELS = {
    'variance': (
        'ReductionKernel', 'T x, W mean, W scale', 'W y',
        '((W)x - mean) * ((W)x - mean) * scale', 'a + b', 'y = a', '0'),
    'merge': (
        'ElementwiseKernel', 'raw W table, int32 n_ranks', 'M mean, M var, W total', '''
        const long long channels = _ind.size(), row = 1 + 2 * channels;
        W count = 0, merged = 0, spread = 0;
        for (int rank = 0; rank < n_ranks; ++rank)
            count += table[rank * row];
        for (int rank = 0; rank < n_ranks; ++rank)
            merged += table[rank * row] / count * table[rank * row + 1 + i];
        for (int rank = 0; rank < n_ranks; ++rank) {
            const W difference = table[rank * row + 1 + i] - merged;
            spread += table[rank * row] / count * (
                table[rank * row + 1 + channels + i] + difference * difference);
        }
        mean = (M)merged;
        var = (M)spread;
        total = count;'''),
    'averages': (
        'ElementwiseKernel', 'M mean, M var, W total, W decay', 'A running_mean, A running_var', '''
        const W adjust = total > 1 ? total / (total - 1) : total;
        running_mean = (A)((W)running_mean * decay + (W)mean * (1 - decay));
        running_var = (A)((W)running_var * decay + (W)var * adjust * (1 - decay));'''),
    'gamma_gradient': (
        'ReductionKernel', 'G gy, T x, M mean, M inv_std', 'W y',
        '(W)gy * (((W)x - (W)mean) * (W)inv_std)', 'a + b', 'y = a', '0'),
    'input_gradient': (
        'ElementwiseKernel',
        'G gy, T x, M mean, M inv_std, A gamma, W ggamma, W gbeta, W total', 'T gx', '''
        const W x_hat = ((W)x - (W)mean) * (W)inv_std;
        gx = (T)((W)gamma * (W)inv_std * ((W)gy - (x_hat * ggamma + gbeta) / total));'''),
}


@functools.cache
def kernel(name: str) -> Kernel:
    """Create the kernel with this name in `KERNELS`."""
    import cupy

    kind, *parts = KERNELS[name]
    return getattr(cupy, kind)(*parts, f'chainermn_batch_norm_{name}')


def statistics(x: Array, axis: tuple[int, ...], expander: Expander, dtype: np.dtype) -> Array:
    """Return the number of elements per channel, the means and the variances, as a flat array."""
    import cupy

    count = prod(x.shape[i] for i in axis)
    shape = tuple(n for i, n in enumerate(x.shape) if i not in axis)
    result = cupy.empty(1 + 2 * prod(shape), dtype)
    if not count:
        result[...] = 0
        return result
    result[:1] = count
    mean, var = (part.reshape(shape) for part in (
        result[1:1 + prod(shape)], result[1 + prod(shape):]))
    x.mean(axis=axis, dtype=dtype, out=mean)
    kernel('variance')(x, mean[expander], dtype.type(1 / count), axis=axis, out=var)
    return result


def table(parts: Sequence[DeviceArray]) -> DeviceArray:
    """Return the statistics, one rank per row, without a copy if they share one buffer."""
    import cupy

    first = parts[0].data
    if all(part.data.mem is first.mem and part.data.ptr == first.ptr + rank * part.nbytes
           for rank, part in enumerate(parts)):
        return cupy.ndarray((len(parts), parts[0].size), parts[0].dtype, first)
    return cupy.stack(parts)


def merge(table: Array, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Array, Array, Array]:
    """Merge the statistics of several ranks, one rank per row.

    Returns:
        The means, the variances, and the number of elements per channel, each as an array with one
        entry per channel.
    """
    import cupy

    mean, var = cupy.empty(shape, dtype), cupy.empty(shape, dtype)
    total = cupy.empty(shape, table.dtype)
    kernel('merge')(table.reshape(-1), len(table),
                    mean.reshape(-1), var.reshape(-1), total.reshape(-1))
    return mean, var, total


def update_averages(running_mean: Array, running_var: Array, mean: Array, var: Array, total: Array,
                    decay: float) -> None:
    """Update the moving averages in place; the variance is the unbiased one, as in Chainer."""
    kernel('averages')(mean, var, total, total.dtype.type(decay), running_mean, running_var)


def gradient_sums(gy: Array, x: Array, axis: tuple[int, ...], expander: Expander, mean: Array,
                  inv_std: Array, dtype: np.dtype) -> Array:
    """Return the gradients of beta and gamma, stacked in this order."""
    import cupy

    sums = cupy.empty((2, *mean.shape), dtype)
    gy.sum(axis=axis, dtype=dtype, out=sums[0])
    kernel('gamma_gradient')(gy, x, mean[expander], inv_std[expander], axis=axis, out=sums[1])
    return sums


def input_gradient(gy: Array, x: Array, expander: Expander, mean: Array, inv_std: Array,
                   gamma: Array, sums: Array, total: Array) -> Array:
    """Return the gradient of the input, given the sums of the gradients over all ranks."""
    import cupy

    gx = cupy.empty(x.shape, x.dtype)
    kernel('input_gradient')(
        gy, x, mean[expander], inv_std[expander], gamma[expander], sums[1][expander],
        sums[0][expander], total[expander], gx)
    return gx
