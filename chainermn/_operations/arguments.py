"""Checks of arguments."""
from __future__ import annotations

import operator

from chainermn._types import Object


def is_integer(value: Object) -> bool:
    """Whether a value is an integer, of Python or NumPy, and not a bool."""
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)  # arrays have the method, too
    except TypeError:
        return False
    return True
