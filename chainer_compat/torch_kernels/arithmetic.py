"""Sums, differences and products of elements."""

from __future__ import annotations

import numpy as np
import torch
from chainer import FunctionNode
from chainer.functions.math.basic_math import Add, AddConstant, Mul, MulConstant, Neg, Sub

from chainer_compat.torch_kernels.arrays import Expression, check_floats
from chainer_compat.torch_kernels.dispatch import Unsupported


def total(f: Add, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return ``x + y``."""
    check_floats(x, y)
    return x + y


def difference(f: Sub, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return ``x - y``."""
    check_floats(x, y)
    return x - y


def product(f: Mul, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return ``x * y``."""
    check_floats(x, y)
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
    check_floats(x)
    return -x


def _number(value: object, x: torch.Tensor) -> float:
    check_floats(x)
    if not isinstance(value, int | float | np.floating | np.integer):
        raise Unsupported
    return float(value)


EXPRESSIONS: dict[type[FunctionNode], Expression] = {
    Add: total, AddConstant: with_constant, Mul: product, MulConstant: times_constant,
    Neg: negative, Sub: difference}
