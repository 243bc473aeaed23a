"""NumPy functions that models call with their inputs, for example to compute masks from lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from chainer_compat.pytorch.expressions.arrays import dtype_of
from chainer_compat.pytorch.expressions.indexing import element

#: Functions with the same name and the same arguments in PyTorch.
EQUAL = (
    'absolute', 'add', 'bitwise_and', 'bitwise_or', 'ceil', 'cos', 'divide', 'equal', 'exp',
    'expm1', 'floor', 'floor_divide', 'greater', 'greater_equal', 'isfinite', 'isinf', 'isnan',
    'less', 'less_equal', 'log', 'log1p', 'logical_and', 'logical_not', 'logical_or', 'maximum',
    'minimum', 'multiply', 'negative', 'not_equal', 'power', 'remainder', 'sign', 'sin', 'sqrt',
    'square', 'subtract', 'tanh', 'trunc')


def equal_function(name: str) -> Any:
    """Return the expression of a function with the same name, with NumPy's result dtype."""
    def expression(f: Any, *xs: Any) -> Any:
        dtype = f.out_dtypes[0] if f.out_dtypes[0].kind == 'f' else np.result_type(*f.arguments)
        return getattr(torch, name)(*(
            f.constant(np.asarray(x, dtype)) if isinstance(x, bool | int | float)
            else x.to(dtype_of(dtype)) for x in xs))

    return expression


def reduction(function: Any) -> Any:
    """Return the expression of a reduction."""
    def expression(f: Any, x: Any, axis: Any = None, keepdims: bool = False) -> Any:
        if f.out_dtypes[0].kind == 'f':
            x = x.to(dtype_of(f.out_dtypes[0]))
        if axis is None and not keepdims:
            return function(x)
        if axis is None:
            raise NotImplementedError('keepdims without axis')
        return function(x, axis, keepdim=keepdims)

    return expression


EXPRESSIONS: dict[str, Callable[..., Any]] = {
    **{name: equal_function(name) for name in EQUAL},
    'amax': reduction(torch.amax),
    'array': lambda f, xs, dtype: torch.stack(list(xs)).to(dtype_of(dtype)),
    'all': reduction(torch.all),
    'amin': reduction(torch.amin),
    'any': reduction(torch.any),
    'argmax': reduction(torch.argmax),
    'argmin': reduction(torch.argmin),
    'astype': lambda f, x, dtype, **_: x.to(dtype_of(dtype)),
    'broadcast_to': lambda f, x, shape: x.expand(shape),
    'concatenate': lambda f, xs, axis=0: torch.cat(list(xs), axis),
    'clip': lambda f, x, low, high: torch.clamp(x, low, high),
    'expand_dims': lambda f, x, axis: x.unsqueeze(axis),
    'fix': lambda f, x: torch.trunc(x),
    'invert': lambda f, x: torch.bitwise_not(x),
    'flatten': lambda f, x: x.reshape(-1),
    'full_like': lambda f, x, value, **_: torch.full_like(x, value),
    'getitem': lambda f, x, key: element(
        f, x, *(each if isinstance(each, tuple) else (each,) for each in (key, f.arguments[1]))),
    'matmul': lambda f, x, y: torch.matmul(x, y),
    'max': reduction(torch.amax),
    'mean': reduction(torch.mean),
    'min': reduction(torch.amin),
    'ones_like': lambda f, x, **_: torch.ones_like(x),
    'random.random_sample':
        lambda f: f.call(torch.rand, f.out_shapes[0], dtype=torch.float64),
    'random.standard_normal':
        lambda f: f.call(torch.randn, f.out_shapes[0], dtype=torch.float64),
    'ravel': lambda f, x: x.reshape(-1),
    'reshape': lambda f, x, *shape: x.reshape(shape[0] if len(shape) == 1 else shape),
    'stack': lambda f, xs, axis=0: torch.stack(list(xs), axis),
    'squeeze': lambda f, x, axis: x.squeeze(axis),
    'sum': reduction(torch.sum),
    'swapaxes': lambda f, x, axis1, axis2: x.transpose(axis1, axis2),
    'transpose': lambda f, x, *axes: (
        x.permute(axes[0] if len(axes) == 1 and isinstance(axes[0], tuple | list) else axes)
        if axes else x.permute(tuple(range(len(f.in_shapes[0])))[::-1])),
    'where': lambda f, condition, x, y: torch.where(condition, x, y),
    'zeros_like': lambda f, x, **_: torch.zeros_like(x),
}
