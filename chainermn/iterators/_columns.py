"""A batch in a form that is quick to pickle: equal arrays side by side, as bytes.

To pickle a small array takes longer than to send it, and a batch has one or two for each example.
So a batch of pairs ``[(x, t), ...]`` is packed as its two columns, and a column of arrays of one
shape and dtype, or of NumPy scalars of one type, as what these hold.
"""
from __future__ import annotations

import contextlib
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

#: Arrays of more bytes are left as they are: to pickle one of them takes no longer than to copy it.
_LARGE = 2**15

#: Kinds of dtypes whose elements are no more than bytes: booleans and numbers.
_KINDS = 'biufc'

#: The types of NumPy's numbers with the name of the dtype of each.
_SCALARS = {kind: np.dtype(kind).str for kind in {*np.sctypeDict.values()}
            if np.dtype(kind).kind in _KINDS}
_TUPLES = {tuple}

_dtype_of, _shape_of = attrgetter('dtype'), attrgetter('shape')


def pack(batch: Any) -> tuple[str, Any]:
    """Returns something of which :func:`unpack` makes an equal batch."""
    if type(batch) is not list or not batch:
        return 'as it is', batch
    if {*map(type, batch)} == _TUPLES and batch[0]:
        try:
            columns = [*zip(*batch, strict=True)]
        except ValueError:  # of several lengths
            return 'column', _packed(batch)
        return 'tuples', [*map(_packed, columns)]
    return 'column', _packed(batch)


def unpack(packed: tuple[str, Any]) -> Any:
    """Returns the batch.  Its arrays are its own: they can be written to, and share no elements."""
    form, content = packed
    if form == 'tuples':
        return [*zip(*map(_unpacked, content), strict=True)]
    return content if form == 'as it is' else _unpacked(content)


def _packed(column: Sequence[Any]) -> tuple[str | None, Any, Any]:
    """The dtype, the shape of one example, and the elements of all; or only the column itself."""
    kinds = {*map(type, column)}
    if len(kinds) == 1:
        kind, = kinds
        if kind in _SCALARS:
            return _SCALARS[kind], (), b''.join(column)
        if kind is np.ndarray and _are_alike(column):  # no subclass, which may have more to it
            with contextlib.suppress(TypeError):  # not in C order
                return column[0].dtype.str, column[0].shape, b''.join(column)
    return None, None, column


def _are_alike(column: Sequence[Any]) -> bool:
    """Whether arrays are small and hold just elements of one dtype in one shape."""
    first = column[0]
    dtype, shape = first.dtype, first.shape
    return (dtype.kind in _KINDS and shape != () and first.nbytes <= _LARGE
            and [*map(_dtype_of, column)].count(dtype) == len(column)
            and [*map(_shape_of, column)].count(shape) == len(column))


def _unpacked(column: tuple[str | None, Any, Any]) -> Any:
    dtype, shape, content = column
    if dtype is None:
        return content
    return [*np.frombuffer(content, dtype).copy().reshape(-1, *shape)]
