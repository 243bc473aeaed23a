"""Observed values: numbers or arrays, which are exchanged in host memory."""
from __future__ import annotations

from typing import TypeAlias

import chainer
import numpy as np

#: A number, or an array of any shape.
Value: TypeAlias = float | np.ndarray


def to_host(value: Value | chainer.Variable) -> Value:
    """Copy a value to host memory; all ranks of a node would receive a GPU array on device 0.

    Args:
        value: Number, NumPy or CuPy array, or Variable.

    Returns:
        Number or NumPy array; a scalar instead of an array without dimensions.
    """
    if isinstance(value, chainer.Variable):
        value = value.array
    if isinstance(value, chainer.get_array_types()):
        # A copy, since the program may reuse the array.
        value = np.array(chainer.get_device('@numpy').send(value))[()]
    return value
