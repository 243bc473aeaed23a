"""Sums, differences and products of elements."""

from __future__ import annotations

import numpy as np
import torch
from chainer import FunctionNode
from chainer.functions.math.basic_math import Add, AddConstant, Mul, MulConstant, Neg, Sub
from chainer.functions.noise.dropout import Dropout

from chainer_compat.torch_kernels.arrays import Expression, tensor
from chainer_compat.torch_kernels.dispatch import Unsupported


def total(f: Add, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return ``x + y``."""
    _check(x, y)
    return x + y


def difference(f: Sub, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return ``x - y``."""
    _check(x, y)
    return x - y


def product(f: Mul, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return ``x * y``."""
    _check(x, y)
    f.retain_inputs((0, 1))
    return x * y


def with_constant(f: AddConstant, x: torch.Tensor) -> torch.Tensor:
    """Return ``x + value``."""
    return x + _number(f.value, x)


def times_constant(f: MulConstant, x: torch.Tensor) -> torch.Tensor:
    """Return ``x * value``."""
    return x * _number(f.value, x)


def negative(f: Neg, x: torch.Tensor) -> torch.Tensor:
    """Return ``-x``."""
    _check(x)
    return -x


def dropout(f: Dropout, x: torch.Tensor) -> torch.Tensor:
    """Set random elements to zero, and scale the others."""
    if f.mask is not None:
        raise Unsupported
    _check(x)
    mask = np.random.rand(*x.shape) >= f.dropout_ratio
    x_ = x.detach().numpy()
    scale = x_.dtype.type(1. / (1 - f.dropout_ratio))
    f.mask = np.multiply(mask, scale, out=np.empty_like(x_))
    return x * tensor(f.mask, channels_last=True)


def _check(*xs: torch.Tensor) -> None:
    for x in xs:
        if x.dtype != xs[0].dtype or not x.dtype.is_floating_point:
            raise Unsupported


def _number(value: object, x: torch.Tensor) -> float:
    _check(x)
    if not isinstance(value, int | float | np.floating | np.integer):
        raise Unsupported
    return float(value)


EXPRESSIONS: dict[type[FunctionNode], Expression] = {
    Add: total, AddConstant: with_constant, Dropout: dropout, Mul: product,
    MulConstant: times_constant, Neg: negative, Sub: difference}
