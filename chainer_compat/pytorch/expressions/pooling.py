"""Pooling, unpooling and upsampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as N

from chainer_compat.pytorch.expressions.arrays import widths
from chainer_compat.pytorch.expressions.connection import DECONVOLUTIONS
from chainer_compat.pytorch.kernels import pooling as kernels
from chainer_compat.pytorch.tensors.arrays import Expression

MAXIMA = {1: N.max_pool1d, 2: N.max_pool2d, 3: N.max_pool3d}
MEANS = {1: N.avg_pool1d, 2: N.avg_pool2d, 3: N.avg_pool3d}


def windows(f: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return window size, stride and padding as tuples."""
    if hasattr(f, 'ksize'):
        return tuple(f.ksize), tuple(f.stride), tuple(f.pad)
    return (f.kh, f.kw), (f.sy, f.sx), (f.ph, f.pw)


def max_pooling(f: Any, x: Any) -> Any:
    """``F.max_pool1d``, ``2d``, ``3d``; with ``cover_all``, after padding with ``-inf``."""
    ksize, stride, pad = windows(f)
    x, pad = _padded(f, x, ksize, stride, pad, float('-inf'))
    return MAXIMA[len(ksize)](x, ksize, stride, pad)


def average_pooling(f: Any, x: Any) -> Any:
    """``F.avg_pool1d``, ``2d``, ``3d``; padding counts as 0, unless ``pad_value`` is ``None``."""
    ksize, stride, pad = windows(f)
    counts_padding = getattr(f, 'pad_value', 0) is not None
    if any(p > k // 2 for p, k in zip(pad, ksize, strict=True)):
        if not counts_padding:
            raise NotImplementedError('pad_value=None with padding of more than half a window')
        x, pad = N.pad(x, widths(pad, pad)), tuple(0 for _ in pad)
    return MEANS[len(ksize)](x, ksize, stride, pad, False, counts_padding)


def unpooling(f: Any, x: Any) -> Any:
    """``F.conv_transpose2d`` of each channel with a weight of ones."""
    ksize, stride, pad = windows(f)
    shape, outs = f.in_shapes[0], f.out_shapes[0][2:]
    full = [(size - 1) * s + k for size, s, k in zip(shape[2:], stride, ksize, strict=True)]
    flat = x.reshape(-1, 1, *shape[2:])
    ones = f.constant(np.ones((1, 1, *ksize), f.in_dtypes[0]))
    y = DECONVOLUTIONS[len(ksize)](flat, ones, None, stride)
    y = N.pad(y, widths([-p for p in pad], [
        out - whole + p for p, out, whole in zip(pad, outs, full, strict=True)]))
    return y.reshape(-1, *f.out_shapes[0][1:])


def upsampling(f: Any, x: Any) -> Any:
    """``scatter_add`` to the positions of the maxima, from the argument ``indexes``."""
    ksize, stride, pad = windows(f)
    (_, channels, rows, columns), (_, _, h, w) = f.in_shapes[0], f.out_shapes[0]
    index = f.indexes.long()
    ys = f.constant(np.arange(rows)[:, None] * stride[0])
    xs = f.constant(np.arange(columns) * stride[1])
    top = torch.div(index, ksize[1], rounding_mode='floor') + ys
    left = index % ksize[1] + xs
    height, width = h + 2 * pad[0] + stride[0], w + 2 * pad[1] + stride[1]
    zeros = torch.zeros_like(x[:, :, :1, :1]).expand(-1, -1, height, width).flatten(2)
    y = zeros.scatter_add(2, (top * width + left).flatten(2), x.flatten(2))
    y = y.reshape(-1, channels, height, width)
    return y[:, :, pad[0]:pad[0] + h, pad[1]:pad[1] + w]


def _padded(f: Any, x: Any, ksize: tuple[int, ...], stride: tuple[int, ...],
            pad: tuple[int, ...], value: float) -> tuple[Any, tuple[int, ...]]:
    """Return the input, padded if PyTorch cannot do it, and the padding that is left to PyTorch."""
    ends = tuple((out - 1) * s + k - size - p for out, s, k, size, p in zip(
        f.out_shapes[0][2:], stride, ksize, f.in_shapes[0][2:], pad, strict=True))
    fits = all(end <= p <= k // 2 for p, end, k in zip(pad, ends, ksize, strict=True))
    if fits:
        return x, pad
    return (N.pad(x, widths(pad, [max(end, 0) for end in ends]), value=value),
            tuple(0 for _ in pad))


EXPRESSIONS: dict[str, Callable[..., Any]] = {
    'pooling.average_pooling_2d.AveragePooling2D': average_pooling,
    'pooling.average_pooling_nd.AveragePoolingND': average_pooling,
    'pooling.max_pooling_nd.MaxPoolingND': max_pooling,
    'pooling.unpooling_2d.Unpooling2D': unpooling,
    'pooling.unpooling_nd.UnpoolingND': unpooling,
    'pooling.upsampling_2d.Upsampling2D': upsampling,
}


RECORDED: dict[str, Expression] = {
    'pooling.average_pooling_2d.AveragePooling2D': kernels.recorded_average,
    'pooling.max_pooling_nd.MaxPoolingND': kernels.recorded_maximum,
}
