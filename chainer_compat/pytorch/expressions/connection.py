"""Linear functions, convolutions and deconvolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as N

from chainer_compat.pytorch.expressions.arrays import widths
from chainer_compat.pytorch.kernels import convolution as convolutions
from chainer_compat.pytorch.kernels import linear
from chainer_compat.pytorch.tensors.arrays import Expression

CONVOLUTIONS = {1: N.conv1d, 2: N.conv2d, 3: N.conv3d}
DECONVOLUTIONS = {1: N.conv_transpose1d, 2: N.conv_transpose2d, 3: N.conv_transpose3d}


def convolution(f: Any, x: Any, W: Any, b: Any = None) -> Any:
    """``F.conv1d``, ``conv2d`` or ``conv3d``; with ``cover_all``, after padding at the end."""
    stride, pad, dilate = options(f)
    sizes = f.in_shapes[0][2:]
    missing = [(out - 1) * s + (k - 1) * d + 1 - size - 2 * p for out, s, k, d, size, p in zip(
        f.out_shapes[0][2:], stride, f.in_shapes[1][2:], dilate, sizes, pad, strict=True)]
    if f.cover_all and max(missing) > 0:
        x = N.pad(x, widths(pad, [p + max(more, 0) for p, more in zip(pad, missing, strict=True)]))
        pad = (0,) * len(pad)
    return CONVOLUTIONS[len(sizes)](x, W, b, stride, pad, dilate, f.groups)


def deconvolution(f: Any, x: Any, W: Any, b: Any = None) -> Any:
    """``F.conv_transpose2d``; for other output sizes, without padding, then cropped or padded."""
    stride, pad, dilate = options(f)
    sizes, kernel, outs = f.in_shapes[0][2:], f.in_shapes[1][2:], f.out_shapes[0][2:]
    full = [(size - 1) * s + (k - 1) * d + 1
            for size, s, k, d in zip(sizes, stride, kernel, dilate, strict=True)]
    extra = [out - whole + 2 * p for out, whole, p in zip(outs, full, pad, strict=True)]
    function = DECONVOLUTIONS[len(sizes)]
    if all(0 <= e < max(s, d) for e, s, d in zip(extra, stride, dilate, strict=True)):
        return function(x, W, b, stride, pad, tuple(extra), f.groups, dilate)
    y = function(x, W, None, stride, 0, 0, f.groups, dilate)
    y = N.pad(y, widths([-p for p in pad], [e - p for p, e in zip(pad, extra, strict=True)]))
    return y if b is None else y + b.reshape(-1, *[1] * len(sizes))


def options(f: Any) -> tuple[Any, Any, Any]:
    """Return stride, padding and dilation as tuples."""
    if hasattr(f, 'stride'):
        return tuple(f.stride), tuple(f.pad), tuple(f.dilate)
    return (f.sy, f.sx), (f.ph, f.pw), (f.dy, f.dx)


def bilinear(f: Any, e1: Any, e2: Any, W: Any, *others: Any) -> Any:
    """``torch.einsum('ni,nj,ijk->nk', e1, e2, W)``, plus the linear terms."""
    e1, e2 = e1.flatten(1), e2.flatten(1)
    y = torch.einsum('ni,nj,ijk->nk', e1, e2, W)
    if others:
        V1, V2, b = others
        y = y + e1.matmul(V1) + e2.matmul(V2) + b
    return y


def local_convolution(f: Any, x: Any, W: Any, b: Any = None) -> Any:
    """``F.unfold``, then ``torch.einsum`` with the weight of each position."""
    outs, rows, columns, ins, kh, kw = f.in_shapes[1]
    patches = N.unfold(x, (kh, kw), stride=(f.sy, f.sx))
    needed = f.in_shapes[0][3] - kw
    patches = patches.reshape(-1, ins * kh * kw, patches.shape[2] // (needed // f.sx + 1),
                              needed // f.sx + 1)[:, :, :rows, :columns]
    y = torch.einsum('nkrc,orck->norc', patches, W.reshape(outs, rows, columns, -1))
    return y if b is None else y + b


def shift(f: Any, x: Any) -> Any:
    """``torch.cat`` of groups of channels, each a part of the padded input."""
    c, h, w = f.in_shapes[0][1:]
    py, px = f.kh // 2 * abs(f.dy), f.kw // 2 * abs(f.dx)
    groups = f.kh * f.kw
    size = c // groups
    padded = N.pad(x, (px, px, py, py))
    parts = []
    for i in range(groups):
        center = (groups - 1) // 2
        position = {center: groups - 1, groups - 1: center}.get(i, i)
        top = py - (position // f.kw - py // abs(f.dy)) * f.dy
        left = px - (position % f.kw - px // abs(f.dx)) * f.dx
        end = (i + 1) * size if i < groups - 1 else c
        parts.append(padded[:, i * size:end, top:top + h, left:left + w])
    return torch.cat(parts, 1)


def im2col(f: Any, x: Any) -> Any:
    """``F.unfold(x, ...).reshape(...)``."""
    rows, columns = f.out_shapes[0][2:]
    sizes = f.in_shapes[0][2:]
    missing = [max(0, (out - 1) * s + (k - 1) * d + 1 - size - 2 * p) for out, s, k, d, size, p in
               zip((rows, columns), (f.sy, f.sx), (f.kh, f.kw), (f.dy, f.dx), sizes, (f.ph, f.pw),
                   strict=True)]
    x = N.pad(x, (f.pw, f.pw + missing[1], f.ph, f.ph + missing[0]))
    y = N.unfold(x, (f.kh, f.kw), (f.dy, f.dx), 0, (f.sy, f.sx))
    return y.reshape(-1, f.out_shapes[0][1], rows, columns)


def transformer_grid(f: Any, theta: Any) -> Any:
    """``F.affine_grid(theta, size, align_corners=True).permute(0, 3, 1, 2)``."""
    h, w = f.output_shape
    ys, xs = np.meshgrid(np.linspace(-1, 1, h), np.linspace(-1, 1, w), indexing='ij')
    coordinates = np.stack([xs, ys, np.ones_like(xs)]).reshape(3, -1)
    points = f.constant(coordinates.astype(f.in_dtypes[0]))
    return theta.matmul(points).reshape(-1, 2, h, w)


def transformer_sampler(f: Any, x: Any, grid: Any) -> Any:
    """``F.grid_sample(x, grid, align_corners=True)``; points outside are zero."""
    return N.grid_sample(x, grid.permute(0, 2, 3, 1), 'bilinear', 'zeros', True)


EXPRESSIONS: dict[str, Callable[..., Any]] = {
    'array.im2col.Im2Col': im2col,
    'array.spatial_transformer_grid.SpatialTransformerGrid': transformer_grid,
    'array.spatial_transformer_sampler.SpatialTransformerSampler': transformer_sampler,
    'connection.bilinear.BilinearFunction': bilinear,
    'connection.convolution_2d.Convolution2DFunction': convolution,
    'connection.convolution_nd.ConvolutionND': convolution,
    'connection.deconvolution_2d.Deconvolution2DFunction': deconvolution,
    'connection.deconvolution_nd.DeconvolutionND': deconvolution,
    'connection.linear.LinearFunction': lambda f, x, W, b=None: N.linear(x, W, b),
    'connection.local_convolution_2d.LocalConvolution2DFunction': local_convolution,
    'connection.shift.Shift': shift,
}


RECORDED: dict[str, Expression] = {
    'connection.convolution_2d.Convolution2DFunction': convolutions.recorded,
    'connection.linear.LinearFunction': linear.recorded,
}
