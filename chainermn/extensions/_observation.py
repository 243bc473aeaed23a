"""Prepares the values of observations for communication: copies them to host memory."""
from __future__ import annotations

from typing import TypeAlias

import chainer
import numpy as np

#: A number, or an array of any shape.
Value: TypeAlias = float | np.ndarray


def to_host(value: Value | chainer.Variable) -> Value:
    """Copy a value to host memory, because receivers would put a GPU array on device 0.

    Args:
        value: Number, NumPy or CuPy array, or Variable.

    Returns:
        A number or NumPy array; a scalar if the array has no dimensions.
    """
    if isinstance(value, chainer.Variable):
        value = value.array
    if isinstance(value, chainer.get_array_types()):
        # Copy the array, because user code may reuse it.
        value = np.array(chainer.get_device('@numpy').send(value))[()]
    return value
