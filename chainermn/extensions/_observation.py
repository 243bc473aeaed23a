"""Prepares observations for communication: values in host memory, and numbers of samples."""
from __future__ import annotations

from typing import TypeAlias

import chainer
import numpy as np

from chainermn.communicators.communicator_base import CommunicatorBase

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


def count_samples(comm: CommunicatorBase, trainer: chainer.training.Trainer) -> int:
    """Return the number of samples per epoch of all ranks together.

    Collective: every rank calls it.

    Returns:
        The same number on all ranks; 0 if the number is unknown on any rank.
    """
    try:
        samples = len(trainer.updater.get_iterator('main').dataset)
    except Exception:  # an updater or iterator of a different type
        samples = 0
    by_rank = comm.allgather_obj(samples)
    return sum(by_rank) if all(by_rank) else 0
