"""Maximum and average pooling in two dimensions."""

from __future__ import annotations

import functools

import numpy as np
import torch
from chainer.functions.pooling.average_pooling_2d import AveragePooling2D, AveragePooling2DGrad
from chainer.functions.pooling.max_pooling_nd import MaxPoolingND, MaxPoolingNDGrad

from chainer_compat.pytorch.tensors.arrays import array, tensor
from chainer_compat.pytorch.tensors.gpu_arrays import DTYPES
from chainer_compat.pytorch.tensors.memory_format import empty_like, like
from chainer_compat.pytorch.unsupported import Unsupported

aten = torch.ops.aten

Pair = tuple[int, int]


def maximum(f: MaxPoolingND, inputs: tuple[np.ndarray]) -> tuple[np.ndarray]:
    """Return the maxima of windows, and store their positions for the gradient."""
    x, = inputs
    if f.ndim != 2:
        raise Unsupported
    _check(x.shape, f.ksize, f.stride, f.pad, f.cover_all)
    y, positions = aten.max_pool2d_with_indices(
        tensor(x, channels_last=True), f.ksize, f.stride, f.pad, [1, 1], f.cover_all)
    # In a window with several NaNs, PyTorch chooses the last, Chainer the first. In a window of
    # -inf, PyTorch chooses the first element, Chainer padding.
    if not y.sum().isfinite():
        raise Unsupported
    f._torch_positions = positions
    f._in_shape, f._in_dtype = x.shape, x.dtype
    return array(y),


def recorded_maximum(f: MaxPoolingND, x: torch.Tensor) -> torch.Tensor:
    """Return the maxima of windows."""
    if f.ndim != 2:
        raise Unsupported
    _check(x.shape, f.ksize, f.stride, f.pad, f.cover_all)
    y, positions = aten.max_pool2d_with_indices(
        x, f.ksize, f.stride, f.pad, [1, 1], f.cover_all)
    if not y.detach().sum().isfinite():
        raise Unsupported
    f._torch_positions = positions
    f._in_shape, f._in_dtype = tuple(x.shape), DTYPES[x.dtype]
    return y


def recorded_average(f: AveragePooling2D, x: torch.Tensor) -> torch.Tensor:
    """Return the means of windows; padding counts as zeros."""
    ksize, stride, pad = (f.kh, f.kw), (f.sy, f.sx), (f.ph, f.pw)
    _check(x.shape, ksize, stride, pad, False)
    f._in_shape, f._in_dtype = tuple(x.shape), DTYPES[x.dtype]
    return aten.avg_pool2d(x, ksize, stride, pad, False, True)


def maximum_gradient(grad: MaxPoolingNDGrad, inputs: tuple[np.ndarray]) -> tuple[np.ndarray]:
    """Return the gradient of the input of maximum pooling."""
    f = grad.func
    # Without positions, Chainer computed the maxima.
    if not hasattr(f, '_torch_positions') or inputs[0].dtype != f._in_dtype:
        raise Unsupported
    gy = like(tensor(inputs[0], channels_last=True), f._torch_positions)
    x = empty_like(gy, f._in_shape)
    return array(aten.max_pool2d_with_indices_backward(
        gy, x, f.ksize, f.stride, f.pad, [1, 1], f.cover_all, f._torch_positions)),


def _indexes(f: MaxPoolingND) -> np.ndarray:
    """Return the positions of the maxima within their windows, as Chainer counts them."""
    position = f._torch_positions.numpy()
    (_, kx), (sy, sx), (py, px), width = f.ksize, f.stride, f.pad, f._in_shape[3]
    rows, columns = np.ogrid[:position.shape[2], :position.shape[3]]
    y = position // width - (rows * sy - py)
    x = position % width - (columns * sx - px)
    return y * kx + x


# Only few callers need the indexes, such as unpooling and second derivatives. If Chainer's own code
# assigns this attribute, the assigned value takes precedence.
MaxPoolingND.indexes = functools.cached_property(_indexes)
MaxPoolingND.indexes.__set_name__(MaxPoolingND, 'indexes')


def average(f: AveragePooling2D, inputs: tuple[np.ndarray]) -> tuple[np.ndarray]:
    """Return the means of windows; padding counts as zeros."""
    x, = inputs
    ksize, stride, pad = (f.kh, f.kw), (f.sy, f.sx), (f.ph, f.pw)
    _check(x.shape, ksize, stride, pad, False)
    y = aten.avg_pool2d(tensor(x, channels_last=True), ksize, stride, pad, False, True)
    f._in_shape, f._in_dtype = x.shape, x.dtype
    return array(y),


def average_gradient(f: AveragePooling2DGrad, inputs: tuple[np.ndarray]) -> tuple[np.ndarray]:
    """Return the gradient of the input of average pooling."""
    ksize, stride, pad = (f.kh, f.kw), (f.sy, f.sx), (f.ph, f.pw)
    _check(f._in_shape, ksize, stride, pad, False)
    gy = tensor(inputs[0], channels_last=True)
    x = empty_like(gy, f._in_shape)
    return array(aten.avg_pool2d_backward(gy, x, ksize, stride, pad, False, True, None)),


def _check(shape: tuple[int, ...], ksize: Pair, stride: Pair, pad: Pair, cover_all: bool) -> None:
    """Check that PyTorch supports this padding and returns as many windows as Chainer.

    With ``cover_all``, PyTorch omits windows that only contain padding.
    """
    for size, k, s, p in zip(shape[2:], ksize, stride, pad, strict=True):
        outs = (size + 2 * p - k + (s - 1 if cover_all else 0)) // s + 1
        is_omitted = cover_all and (outs - 1) * s >= size + p
        if 0 in shape or outs < 1 or is_omitted or p > k // 2:
            raise Unsupported
