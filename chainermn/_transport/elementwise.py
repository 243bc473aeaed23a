"""Element-wise reductions with identical results on every transport.

The result is bitwise identical on all ranks, is rounded once, and does not depend on which rank has
a NaN or a negative zero.
"""
from __future__ import annotations

import re
from collections.abc import Callable

import chainer
import numpy as np

from chainermn._operations import call_signature
from chainermn._process.mpi import MPI
from chainermn._transport.base import Prepare
from chainermn._types import Array

OPS = call_signature.OPS[1:]  # without ''

#: Names in other libraries.
_OTHER_NAMES = {'sum': ('add',), 'prod': ('product', 'multiply', 'mul'),
                'max': ('maximum', 'amax'), 'min': ('minimum', 'amin')}


def check_op(op: object, dtype: np.dtype | None = None) -> None:
    """Raise an error if the operation is unknown, or not defined for arrays of a dtype."""
    if not (isinstance(op, str) and op in OPS):
        text = ' '.join(re.sub(' at 0x[0-9a-f]+', '', repr(op)).split())  # the same on all ranks
        raise ValueError(f'op must be one of {", ".join(map(repr, OPS))}, not {text}'
                         f'{_instead_of(op)}')
    if dtype is not None and dtype.kind == 'c' and op in ('max', 'min'):
        raise TypeError(f'complex numbers have no order: use op="sum" or op="prod" for {dtype} '
                        f'arrays, not op={op!r}')


def _instead_of(op: object) -> str:
    """Return advice on what to pass instead of a name or object from another library."""
    if isinstance(op, MPI.Op):
        op = next((name for name in OPS if op == getattr(MPI, name.upper())), op)
    if hasattr(op, 'shape'):
        return '; pass the output array as out='
    words = {*re.split('[^a-z]+', str(getattr(op, '__name__', op)).lower())}
    if words & {'mean', 'avg', 'average'}:
        return '; for the mean, use multi_node_mean(x), or divide the sum by comm.size'
    for known, others in _OTHER_NAMES.items():
        if words & {known, *others}:
            return f'; write op={known!r}'
    if callable(op):
        return '; for a custom reduction, call allgather or allgather_obj and reduce the result'
    return ''


def combined(x: Array, op: str, prepared: Prepare, combine: Callable[..., Array], *args: object
             ) -> Array:
    """Reduce arrays of any dtype with a function that may round and compare differently.

    Args:
        x: This rank's array.
        op: The operation.
        prepared: Function that calls a conversion of the array; its error is raised on all ranks.
        combine: Function that reduces the arrays of all ranks: ``combine(x, op, *args)``. It never
            gets float16 arrays and, for ``'max'`` and ``'min'``, it gets floats as integers. It may
            return ``None`` on ranks without a result.
    """
    if x.dtype.kind == 'f':
        if x.dtype == np.float16:
            wide = prepared(x.nbytes, lambda: x.astype(np.float32))
            with np.errstate(over='ignore'):
                y = combined(wide, op, prepared, combine, *args)
                return None if y is None else y.astype(np.float16)
        if op in ('max', 'min'):
            bits = prepared(x.nbytes, lambda: _ordered_bits(x.reshape(-1), op))
            y = combine(bits, op, *args)
            if y is None:
                return None
            y = _flipped(y).view(x.dtype)
            return y if x.ndim == 1 else y.reshape(x.shape)  # a part has a different length
    return combine(x, op, *args)


def _ordered_bits(x: Array, op: str) -> Array:
    """Return floats as integers in the same order. NaN becomes the value that ``op`` prefers.

    The results of MPI's comparisons of NaNs, and of 0.0 with -0.0, depend on the order of the ranks
    and may differ between ranks.
    """
    nan = x.dtype.type(np.nan if op == 'max' else -np.nan)
    x = chainer.backend.get_array_module(x).where(x == x, x, nan)
    return _flipped(x.view(f'i{x.dtype.itemsize}'))


def _flipped(bits: Array) -> Array:
    """Reverse the order of negative numbers. The function is its own inverse."""
    info = np.iinfo(bits.dtype)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)
