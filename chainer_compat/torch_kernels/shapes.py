"""Functions that change the shape of an array, or the order of its elements."""

from __future__ import annotations

import numpy as np
import torch
from chainer import FunctionNode
from chainer.functions.array.concat import Concat
from chainer.functions.array.reshape import Reshape
from chainer.functions.array.split_axis import SplitAxis
from chainer.functions.array.transpose import Transpose

from chainer_compat.torch_kernels.arrays import Expression, check_floats
from chainer_compat.torch_kernels.dispatch import Unsupported


def reshape(f: Reshape, x: torch.Tensor) -> torch.Tensor:
    """Return ``x.reshape(shape)``."""
    _check(x)
    return x.reshape(f.shape)


def transpose(f: Transpose, x: torch.Tensor) -> torch.Tensor:
    """Return ``x.permute(axes)``."""
    _check(x)
    return x.permute(f.axes if f.axes is not None else tuple(reversed(range(x.ndim))))


def concat(f: Concat, *xs: torch.Tensor) -> torch.Tensor:
    """Return ``torch.cat(xs, axis)``."""
    _check(*xs)
    return torch.cat(xs, f.axis)


def split(f: SplitAxis, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return ``torch.tensor_split(x, indices, axis)``."""
    _check(x)
    indices = f.sections if f.indices is None else tuple([int(i) for i in f.indices])
    if isinstance(indices, tuple) and any(i < 0 for i in indices):
        raise Unsupported
    ys = torch.tensor_split(x, indices, f.axis)
    f._xp = np
    f._shapes = [tuple(y.shape) for y in ys]
    return tuple(ys)


def _check(*xs: torch.Tensor) -> None:
    check_floats(*xs)
    if not all([x.numel() for x in xs]):
        raise Unsupported


EXPRESSIONS: dict[type[FunctionNode], Expression] = {
    Concat: concat, Reshape: reshape, SplitAxis: split, Transpose: transpose}
