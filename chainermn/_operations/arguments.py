"""Checks of arguments."""
from __future__ import annotations

import operator

import numpy as np

from chainermn._types import Object


def is_integer(value: Object) -> bool:
    """Return whether a value is a Python or NumPy integer, but not a bool."""
    if isinstance(value, (bool, np.bool_)):  # some versions of NumPy would only warn
        return False
    try:
        operator.index(value)  # not hasattr, because arrays also have the method __index__
    except TypeError:
        return False
    return True
