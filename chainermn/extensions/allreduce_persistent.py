"""Averages the persistent arrays of a model, such as the statistics of batch normalization."""
from __future__ import annotations

from typing import Any

import chainer
import numpy as np


class AllreducePersistent(chainer.training.Extension):
    """Replaces each floating-point persistent array of a model by its mean over all ranks.

    Collective: every rank calls it.  The mean and variance that batch normalization keeps are those
    of a rank's own batches; their means come from the batches of all ranks.  Run it before a
    model is evaluated or saved, which its trigger (each epoch) and priority (before writers) do.
    Integers, arrays of integers and other values stay as they are.

    Args:
        model: A ``chainer.Link`` with the same persistent arrays on all ranks.
        comm: ChainerMN communicator.
    """

    trigger = 1, 'epoch'
    priority = chainer.training.extension.PRIORITY_WRITER + 1

    def __init__(self, model: Any, comm: Any) -> None:
        self.model = model
        self.comm = comm

    def __call__(self, trainer: Any = None) -> None:
        """Averages.  The trainer is not used.

        Raises:
            TypeError: On all ranks, if the model of a rank is no ``chainer.Link``.
        """
        if not isinstance(self.model, chainer.Link):
            self.comm.refuse('AllreducePersistent', TypeError(
                f'expected a model (chainer.Link) but got {type(self.model)}'))
        groups: dict[Any, list[Any]] = {}
        for array in self._arrays():
            # MPI sums float16 in float32 anyway.
            groups.setdefault(np.promote_types(array.dtype, np.float32), []).append(array)
        for dtype in sorted(groups, key=str):
            self._average(groups[dtype], dtype)

    def _arrays(self) -> list[Any]:
        named = {}
        for path, link in self.model.namedlinks():
            for name in link._persistent:
                value = link.__dict__[name]
                if isinstance(value, chainer.get_array_types()) and value.dtype.kind == 'f':
                    named[f'{path}/{name}'] = value
        return [named[path] for path in sorted(named)]

    def _average(self, arrays: list[Any], dtype: Any) -> None:
        """One exchange for all arrays that are summed in a dtype."""
        xp = chainer.backend.get_array_module(*arrays)
        mean = self.comm.multi_node_mean(xp.concatenate(
            [array.ravel().astype(dtype, copy=False) for array in arrays]))
        start = 0
        for array in arrays:
            array[...] = mean[start:start + array.size].reshape(array.shape)
            start += array.size
