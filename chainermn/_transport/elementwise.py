"""How arrays are combined element by element: what an operation means, whatever carries it out.

The result has the same bits wherever it arrives, is rounded once, and does not depend on which rank
has a NaN or the zero with a sign.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
import numpy as np

OPS = ('sum', 'prod', 'max', 'min')


def check_op(op: Any, dtype: Any = None) -> None:
    """Raises if there is no such operation, or none for arrays of that dtype."""
    if op not in OPS:
        raise ValueError(f'op has to be one of {", ".join(map(repr, OPS))}, not {op!r}')
    if dtype is not None and dtype.kind == 'c' and op in ('max', 'min'):
        raise TypeError(f'complex numbers have no order: op={op!r} takes no {dtype} array')


def combined(x: Any, op: str, combine: Callable[..., Any], *args: Any) -> Any:
    """Combines arrays of any dtype by a function that rounds and compares as it likes.

    Args:
        x: This rank's array.
        op: The operation.
        combine: Combines the arrays of all ranks: ``combine(x, op, *args)``.  It gets floats with
            ``'max'`` and ``'min'`` only as integers, and float16 not at all.  It may return
            ``None``, as on ranks that get nothing.
    """
    if x.dtype.kind == 'f':
        if x.dtype == np.float16:
            with np.errstate(over='ignore'):
                y = combined(x.astype(np.float32), op, combine, *args)
                return None if y is None else y.astype(np.float16)
        if op in ('max', 'min'):
            y = combine(_ordered_bits(x.reshape(-1), op), op, *args)
            if y is None:
                return None
            y = _flipped(y).view(x.dtype)
            return y if x.ndim == 1 else y.reshape(x.shape)  # a piece has its own length
    return combine(x, op, *args)


def _ordered_bits(x: Any, op: str) -> Any:
    """Floats as integers in the same order; a NaN is beyond all others, so that ``op`` keeps it.

    MPI's own comparison of NaNs, and of 0.0 with -0.0, depends on the order of the ranks, and can
    come out differently on them.
    """
    nan = x.dtype.type(np.nan if op == 'max' else -np.nan)
    x = chainer.backend.get_array_module(x).where(x == x, x, nan)
    return _flipped(x.view(f'i{x.dtype.itemsize}'))


def _flipped(bits: Any) -> Any:
    """Reverses the order of the negative ones; its own inverse."""
    info = np.iinfo(bits.dtype)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)
