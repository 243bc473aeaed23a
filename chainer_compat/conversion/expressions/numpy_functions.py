"""Functions of NumPy that models call with their inputs, such as masks computed from lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from chainer_compat.conversion.expressions.arrays import dtype_of
from chainer_compat.conversion.expressions.indexing import element

#: With the same name and the same arguments.
EQUAL = (
    'absolute', 'add', 'ceil', 'cos', 'equal', 'exp', 'floor', 'greater', 'greater_equal',
    'less', 'less_equal', 'log', 'logical_and', 'logical_not', 'logical_or', 'maximum',
    'minimum', 'multiply', 'negative', 'not_equal', 'sign', 'sin', 'sqrt', 'square', 'subtract',
    'tanh', 'trunc')


def equal_function(name: str) -> Any:
    """Return the expression of a function with the same name in PyTorch."""
    def expression(f: Any, *xs: Any) -> Any:
        return getattr(torch, name)(*(
            f.constant(np.asarray(x)) if isinstance(x, bool | int | float) else x for x in xs))

    return expression


def reduction(function: Any) -> Any:
    """Return the expression of a reduction."""
    def expression(f: Any, x: Any, axis: Any = None, keepdims: bool = False) -> Any:
        if axis is None and not keepdims:
            return function(x)
        if axis is None:
            raise NotImplementedError('keepdims without axis')
        return function(x, axis, keepdim=keepdims)

    return expression


EXPRESSIONS: dict[str, Callable[..., Any]] = {
    **{name: equal_function(name) for name in EQUAL},
    'amax': reduction(torch.amax),
    'amin': reduction(torch.amin),
    'argmax': reduction(torch.argmax),
    'argmin': reduction(torch.argmin),
    'astype': lambda f, x, dtype, **_: x.to(dtype_of(dtype)),
    'broadcast_to': lambda f, x, shape: x.expand(shape),
    'concatenate': lambda f, xs, axis=0: torch.cat(list(xs), axis),
    'expand_dims': lambda f, x, axis: x.unsqueeze(axis),
    'fix': lambda f, x: torch.trunc(x),
    'flatten': lambda f, x: x.reshape(-1),
    'getitem': lambda f, x, key: element(f, x, key if isinstance(key, tuple) else (key,)),
    'max': reduction(torch.amax),
    'mean': reduction(torch.mean),
    'min': reduction(torch.amin),
    'ravel': lambda f, x: x.reshape(-1),
    'reshape': lambda f, x, *shape: x.reshape(shape[0] if len(shape) == 1 else shape),
    'stack': lambda f, xs, axis=0: torch.stack(list(xs), axis),
    'swapaxes': lambda f, x, axis1, axis2: x.transpose(axis1, axis2),
    'transpose': lambda f, x, *axes: (
        x.permute(axes[0] if len(axes) == 1 and isinstance(axes[0], tuple | list) else axes)
        if axes else x.permute(tuple(range(len(f.in_shapes[0])))[::-1])),
    'where': lambda f, condition, x, y: torch.where(condition, x, y),
}
