"""Checks of arguments."""
from __future__ import annotations

import operator

from chainermn._types import Object


def is_integer(value: Object) -> bool:
    """Return whether a value is an integer, of Python or NumPy, and not a bool."""
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)  # arrays also have the method
    except TypeError:
        return False
    return True
