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

_description = attrgetter('dtype', 'shape')


def pack(batch: Any) -> tuple[str, Any]:
    """Returns something of which :func:`unpack` makes an equal batch."""
    if type(batch) is not list or not batch:
        return 'as it is', batch
    if {*map(type, batch)} == {tuple} and len({*map(len, batch)}) == 1 and batch[0]:
        return 'tuples', [_packed(column) for column in zip(*batch, strict=True)]
    return 'column', _packed(batch)


def unpack(packed: tuple[str, Any]) -> Any:
    """Returns the batch.  Its arrays are its own: they can be written to, and share no elements."""
    form, content = packed
    if form == 'tuples':
        return [*zip(*map(_unpacked, content), strict=True)]
    return content if form == 'as it is' else _unpacked(content)


def _packed(column: Sequence[Any]) -> tuple[str | None, Any, Any]:
    """The dtype, the shape of one example, and the elements of all; or only the column itself."""
    if len({*map(type, column)}) == 1 and _is_plain(column):
        with contextlib.suppress(TypeError):  # not in C order
            return column[0].dtype.str, column[0].shape, b''.join(column)
    return None, None, column


def _is_plain(column: Sequence[Any]) -> bool:
    """Whether a column, of one type, holds just elements of one dtype in one shape."""
    first = column[0]
    if type(first) is np.ndarray:  # not of a subclass, which may have more than its elements
        return (first.dtype.kind in _KINDS and first.shape != () and first.nbytes <= _LARGE
                and len({*map(_description, column)}) == 1)
    return (isinstance(first, np.generic) and first.dtype.kind in _KINDS
            and first.dtype.type is type(first))


def _unpacked(column: tuple[str | None, Any, Any]) -> Any:
    dtype, shape, content = column
    if dtype is None:
        return content
    return [*np.frombuffer(content, dtype).copy().reshape(-1, *shape)]
