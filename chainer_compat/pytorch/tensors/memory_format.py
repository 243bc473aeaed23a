"""The memory format of images: contiguous, or with channels last.

oneDNN, PyTorch's library of convolutions on CPUs, computes with the channels of a pixel next to
each other. It converts contiguous arrays before and after each convolution, which can take longer
than the convolution. Therefore, convolutions return arrays with channels last, and the other
kernels keep this format. Shapes are the same; only the strides differ.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

Shape = tuple[int, ...]


def is_channels_last(array: np.ndarray) -> bool:
    """Return whether an array of images with axes N, C, H, W has channels last in memory.

    It may be a part of a larger array, such as some of its channels.
    """
    if array.ndim != 4:
        return False
    n, c, h, w = array.strides
    return n >= h >= w >= c > 0


def is_faster(x: Shape, W: Shape, stride: Shape) -> bool:
    """Return whether a convolution of these shapes is faster with channels last."""
    # PyTorch 2.13 writes outside the gradient of such weights with fewer than 8 channels.
    if W[2:] == (1, 1) and max(stride) > 1 and W[1] < 16:
        return False
    # The weight and its gradient are also converted, unless they have one element per channel.
    return W[2:] == (1, 1) or math.prod(W) <= 2 * math.prod(x)


def for_convolution(x: Shape, W: Shape, stride: Shape, *images: torch.Tensor
                    ) -> list[torch.Tensor]:
    """Return tensors in the memory format in which a convolution is fastest.

    Args:
        x: The shape of its input.
        W: The shape of its weight.
        stride: Its stride.
        images: Its input, its output, or their gradients.
    """
    is_last = is_faster(x, W, stride)
    return [preferred(each) if is_last else each.contiguous() for each in images]


def preferred(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with channels last if it has images in float32 or bfloat16 on the CPU."""
    if x.ndim != 4 or x.device.type != 'cpu' or x.dtype == torch.float64:
        return x.contiguous()
    _, c, h, w = x.shape
    # Explicit strides, because PyTorch infers the format of a single channel or pixel from them.
    return x.contiguous(memory_format=torch.channels_last).as_strided(
        x.shape, (h * w * c, 1, w * c, c))


def of(x: torch.Tensor) -> torch.memory_format:
    """Return the memory format of a tensor."""
    is_last = x.ndim == 4 and not x.is_contiguous()
    return torch.channels_last if is_last else torch.contiguous_format


def like(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in the memory format of another tensor."""
    return x.contiguous(memory_format=of(other))


def empty_like(x: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return an empty tensor with the dtype, device and memory format of ``x``."""
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=of(x))


#: Number of elements from which different formats cost more than a function call in Python.
MIN_ORDERED = 1 << 13


class _Ordered(torch.autograd.Function):
    """The identity function with a gradient in channels-last format."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gy: torch.Tensor) -> torch.Tensor:
        return gy.contiguous(memory_format=torch.channels_last)


#: ``Function.apply`` without the checks that only ``torch.func`` needs.
_ordered = super(torch.autograd.Function, _Ordered).apply


def with_ordered_gradient(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, and make its gradient keep the memory format of ``x``.

    Use it before functions whose gradient would be contiguous: otherwise element-wise kernels
    upstream, such as the gradient of a ReLU, take ten times as long.
    """
    is_last = x.requires_grad and x.numel() >= MIN_ORDERED and of(x) is torch.channels_last
    return _ordered(x) if is_last else x
