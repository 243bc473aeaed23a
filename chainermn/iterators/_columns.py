"""Packs batches into columns of bytes, which are quick to pickle.

Pickling a small array takes longer than sending it, and a batch has one or two arrays per example.
So a batch of pairs ``[(x, t), ...]`` is packed as two columns. A column is packed as the bytes of
its elements if it has arrays of one shape and dtype, or NumPy scalars of one type.
"""
from __future__ import annotations

import contextlib
from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from chainermn._types import Object

#: Size in bytes. Larger arrays are not packed, because pickling takes no longer than copying.
_LARGE = 2**15

#: Kinds of dtypes whose elements are plain bytes: booleans and numbers.
_KINDS = 'biufc'

#: Dtypes of NumPy's scalar types, as strings.
_SCALARS = {kind: np.dtype(kind).str for kind in {*np.sctypeDict.values()}
            if np.dtype(kind).kind in _KINDS}
_TUPLES = {tuple}

_dtype_of, _shape_of = attrgetter('dtype'), attrgetter('shape')

#: A packed batch: its form, and a column, a list of columns, or the batch itself.
Packed = tuple[str, Object]
#: Dtype, shape of one example, and the elements of all examples; or None, None and the column.
_Column = tuple[str | None, tuple[int, ...] | None, Object]


def pack(batch: Object) -> Packed:
    """Pack a batch so that it is quick to pickle. :func:`unpack` restores it.

    Args:
        batch: Any object. Lists of arrays, scalars, or tuples of these become quicker to pickle.
    """
    if type(batch) is not list or not batch:
        return 'as it is', batch
    if {*map(type, batch)} == _TUPLES and batch[0]:
        try:
            columns = [*zip(*batch, strict=True)]
        except ValueError:  # samples of different lengths
            return 'column', _packed(batch)
        return 'tuples', [*map(_packed, columns)]
    return 'column', _packed(batch)


def unpack(packed: Packed) -> Object:
    """Restore a batch that :func:`pack` packed.

    Args:
        packed: The result of :func:`pack`.

    Returns:
        The batch. Its arrays are writable and do not overlap.
    """
    form, content = packed
    if form == 'tuples':
        return [*zip(*map(_unpacked, content), strict=True)]
    return content if form == 'as it is' else _unpacked(content)


def _packed(column: Sequence[Object]) -> _Column:
    kinds = {*map(type, column)}
    if len(kinds) == 1:
        kind, = kinds
        if kind in _SCALARS:
            return _SCALARS[kind], (), b''.join(column)
        if kind is np.ndarray and _are_homogeneous(column):  # not a subclass
            with contextlib.suppress(TypeError):  # not C-contiguous
                return column[0].dtype.str, column[0].shape, b''.join(column)
    return None, None, column


def _are_homogeneous(column: Sequence[np.ndarray]) -> bool:
    """Return whether the arrays are small, have one dtype and shape, and contain plain bytes."""
    first = column[0]
    dtype, shape = first.dtype, first.shape
    return (dtype.kind in _KINDS and shape != () and 0 < first.nbytes <= _LARGE
            and [*map(_dtype_of, column)].count(dtype) == len(column)
            and [*map(_shape_of, column)].count(shape) == len(column))


def _unpacked(column: _Column) -> Object:
    dtype, shape, content = column
    if dtype is None or shape is None:
        return content
    return [*np.frombuffer(content, dtype).copy().reshape(-1, *shape)]
