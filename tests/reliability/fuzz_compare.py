"""Compares results with expected values."""
from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

#: Outcomes by key: the fault or '', and a value that must be equal on all ranks with that key.
Outcomes = dict[Any, tuple[str, Any]]


def is_right(got: Any, value: Any, close: float | None) -> bool:
    """Whether a result equals a value, including type, dtype and shape."""
    if isinstance(value, (tuple, list)):
        return type(got) is type(value) and len(got) == len(value) and all(
            is_right(a, b, close) for a, b in zip(got, value, strict=True))
    if not isinstance(value, np.ndarray):
        return type(got) is type(value) and got == value
    if type(got) is not np.ndarray or (got.dtype, got.shape) != (value.dtype, value.shape) or (
            not got.dtype.isnative):
        return False
    if close is None:
        return equal(got, value)
    close = max(close, 4 * float(np.finfo(value.dtype).eps))
    return np.allclose(got, value, rtol=close, atol=close, equal_nan=True)


def equal(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether two arrays have equal elements, of which some may be NaN."""
    return np.array_equal(x, y, equal_nan=x.dtype.kind in 'fc')


def _arrays_in(x: Any) -> list[np.ndarray]:
    if isinstance(x, (tuple, list)):
        return [array for item in x for array in _arrays_in(item)]
    return [x] if isinstance(x, np.ndarray) else []


def shares(got: Any, x: np.ndarray) -> bool:
    """Whether an array in a result may share memory with another."""
    return any(np.may_share_memory(array, x) for array in _arrays_in(got))


def digest(got: Any) -> str:
    """A digest of all bits; all NaNs are equal."""
    return hashlib.sha256(b''.join(
        np.where(array != array, np.array(np.nan, array.dtype), array).tobytes()
        if array.dtype.kind in 'fc' else array.tobytes()
        for array in _arrays_in(got))).hexdigest()


def short(x: Any) -> str:
    """A value as one line of limited length."""
    text = ' '.join(repr(x).split())
    return text if len(text) < 400 else f'{text[:400]}...'
