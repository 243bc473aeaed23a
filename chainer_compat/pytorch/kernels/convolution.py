"""Convolutions in one to three dimensions, with stride, padding, dilation and groups.

A deconvolution is the gradient of a convolution with respect to its input.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from chainer import FunctionNode, Variable
from chainer.functions.connection.convolution_2d import Convolution2DFunction
from chainer.functions.connection.deconvolution_2d import Deconvolution2DFunction
from chainer.utils.conv import get_conv_outsize

from chainer_compat.pytorch.kernels import backward
from chainer_compat.pytorch.tensors import memory_format
from chainer_compat.pytorch.tensors.arrays import array, operands, product, rounded, tensor
from chainer_compat.pytorch.tensors.gpu_arrays import precision
from chainer_compat.pytorch.unsupported import Unsupported

aten = torch.ops.aten

Sizes = tuple[int, ...]


def output(f: FunctionNode, x: np.ndarray, W: np.ndarray, b: np.ndarray | None, xp: object = None
           ) -> tuple[np.ndarray]:
    """Convolve ``x`` with ``W`` and add ``b``."""
    options = _options(f, x.shape, W.shape)
    x_, W_, *b_ = operands(x, W, *(() if b is None else (b,)), channels_last=True)
    x_, = memory_format.for_convolution(x.shape, W.shape, options[0], x_)
    with precision(x_, 'convolution'):
        y = torch.convolution(x_, W_, b_[0] if b_ else None, *options)
    return product(memory_format.preferred(y)),


def recorded(f: Convolution2DFunction, x: torch.Tensor, W: torch.Tensor,
             b: torch.Tensor | None = None) -> torch.Tensor:
    """Convolve ``x`` with ``W`` and add ``b``."""
    before, options, after = _plan(f.sy, f.sx, f.ph, f.pw, f.dy, f.dx, f.groups, f.cover_all,
                                   f.cudnn_fast, x.shape, W.shape, x.dtype)
    dtype = x.dtype
    x, W, b = rounded(x, W, b)
    if before is torch.contiguous_format:
        x = memory_format.with_ordered_gradient(x)
    y = torch.conv2d(x.contiguous(memory_format=before), W, b, *options)
    y = y.contiguous(memory_format=after)
    f.retain_inputs((0, 1))
    return y if y.dtype is dtype else y.to(dtype)


@functools.lru_cache(maxsize=1024)
def _plan(sy: int, sx: int, ph: int, pw: int, dy: int, dx: int, groups: int, cover_all: bool,
          cudnn_fast: bool, x: Sizes, W: Sizes, dtype: torch.dtype
          ) -> tuple[torch.memory_format, tuple[object, ...], torch.memory_format]:
    """Return the format of the input, the options of PyTorch's function, and the output format.

    Raises:
        Unsupported: If PyTorch does not support this convolution.
    """
    options = (sy, sx), (ph, pw), (dy, dx)
    if cudnn_fast or not _are_supported(*options, groups, bool(cover_all), x, W, None):
        raise Unsupported
    after = torch.contiguous_format if dtype == torch.float64 else torch.channels_last
    is_last = memory_format.is_faster(x, W, (sy, sx))
    return after if is_last else torch.contiguous_format, (*options, groups), after


def gradients(f: Convolution2DFunction, indexes: tuple[int, ...], grad_outputs: backward.Gradients
              ) -> list[Variable]:
    """Return the gradients of a convolution's inputs, with one call for input and weight."""
    x, W, gy = backward.arrays(f, grad_outputs)
    options = _options(f, x.shape, W.shape, gy.shape)
    x_, W_, gy_ = operands(x, W, gy, channels_last=True)
    x_, gy_ = memory_format.for_convolution(x.shape, W.shape, options[0], x_, gy_)
    with precision(x_, 'convolution'):
        gx, gW, _ = aten.convolution_backward(
            gy_, x_, W_, None, *options, [0 in indexes, 1 in indexes, False])
    return backward.with_bias(gx, gW, grad_outputs[0], x, indexes)


def deconvolution_gradients(
    f: Deconvolution2DFunction, indexes: tuple[int, ...], grad_outputs: backward.Gradients
) -> list[Variable]:
    """Return the gradients of a deconvolution's inputs."""
    x, W, gy = backward.arrays(f, grad_outputs)
    if f.cover_all is None:
        f._set_cover_all(x.shape, W.shape)
    options = _options(f, gy.shape, W.shape, x.shape)
    x_, W_, gy_ = operands(x, W, gy, channels_last=True)
    x_, gy_ = memory_format.for_convolution(gy.shape, W.shape, options[0], x_, gy_)
    with precision(x_, 'convolution'):
        gx = torch.convolution(gy_, W_, None, *options) if 0 in indexes else None
        gW = aten.convolution_backward(
            x_, gy_, W_, None, *options, [False, True, False])[1] if 1 in indexes else None
    return backward.with_bias(gx, gW, grad_outputs[0], x, indexes)


def weight_gradient(f: FunctionNode, x: np.ndarray, gy: np.ndarray, xp: object = None
                    ) -> tuple[np.ndarray]:
    """Return the gradient of a convolution's weight."""
    if f.W_dtype != x.dtype or f.groups < 1:
        raise Unsupported
    shape = gy.shape[1], x.shape[1] // f.groups, *_kernel_size(f)
    options = _options(f, x.shape, shape, gy.shape)
    x_, gy_ = memory_format.for_convolution(
        x.shape, shape, options[0], *operands(x, gy, channels_last=True))
    W_ = x_.new_empty(shape)  # only its shape is used
    with precision(x_, 'convolution'):
        gW = aten.convolution_backward(gy_, x_, W_, None, *options, [False, True, False])[1]
    return product(gW.contiguous()),


def input_gradient(f: FunctionNode, gy: np.ndarray, W: np.ndarray, b: np.ndarray | None,
                   xp: object = None) -> tuple[np.ndarray]:
    """Return the gradient of a convolution's input, plus ``b``: a deconvolution of ``gy``."""
    outs = f.outs if hasattr(f, 'outs') else (f.outh, f.outw)
    shape = len(gy), W.shape[1] * f.groups, *outs
    options = _options(f, shape, W.shape, gy.shape)
    gy_, W_ = operands(gy, W, channels_last=True)
    gy_, = memory_format.for_convolution(shape, W.shape, options[0], gy_)
    b_ = None if b is None else tensor(b).reshape(-1, *[1] * len(outs))
    x_ = memory_format.empty_like(gy_, shape)
    with precision(gy_, 'convolution'):
        gx_, _, _ = aten.convolution_backward(
            gy_, x_, W_, None, *options, [True, False, False])
    gx = product(memory_format.preferred(gx_))
    if b_ is not None:
        gx += array(b_)
    return gx,


def _kernel_size(f: FunctionNode) -> tuple[int, ...]:
    return f.ksize if hasattr(f, 'ksize') else (f.kh, f.kw)


def _options(f: FunctionNode, x: tuple[int, ...], W: tuple[int, ...],
             y: tuple[int, ...] | None = None
             ) -> tuple[Sizes, Sizes, Sizes, bool, list[int], int]:
    """Return the arguments that all of PyTorch's convolutions have in common.

    Args:
        x: The shape of the convolution's input.
        W: The shape of its weight.
        y: The shape of its output, which differs for ``cover_all``.
    """
    if hasattr(f, 'stride'):
        options = tuple(f.stride), tuple(f.pad), tuple(f.dilate)
    else:
        options = (f.sy, f.sx), (f.ph, f.pw), (f.dy, f.dx)
    if not _are_supported(*options, f.groups, bool(f.cover_all), x, W, y):
        raise Unsupported
    return *options, False, [0] * (len(x) - 2), f.groups


@functools.lru_cache(maxsize=1024)
def _are_supported(stride: Sizes, pad: Sizes, dilate: Sizes, groups: int, cover_all: bool,
                   x: Sizes, W: Sizes, y: Sizes | None) -> bool:
    dims = len(x) - 2
    sizes = [get_conv_outsize(size, k, s, p, cover_all, d)
             for cover_all in {False, cover_all}
             for size, k, s, p, d in zip(x[2:], W[2:], stride, pad, dilate, strict=True)]
    is_equal = sizes[:dims] == sizes[-dims:] == list(sizes[:dims] if y is None else y[2:])
    return (1 <= dims <= 3 and is_equal and min(sizes) > 0 and min(x + W) > 0
            and min(*stride, *dilate) > 0 <= min(pad)
            and groups > 0 and x[1] == W[1] * groups and W[0] % groups == 0)
