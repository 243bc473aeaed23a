"""AllreducePersistent: averages persistent arrays, e.g. the means of batch normalization."""
from __future__ import annotations

import chainer
import numpy as np

from chainermn._operations.on_all_ranks import raise_together
from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase


class AllreducePersistent(chainer.training.Extension):
    """Replaces each floating-point persistent array of a model with its mean over all ranks.

    Collective: every rank calls it. Batch normalization keeps the mean and variance of the rank's
    own batches; averaging them gives statistics of all batches. The extension must run before a
    model is evaluated or saved, as it does with the default trigger (every epoch) and priority
    (before writers). Integers, integer arrays and other values are not changed.

    Args:
        model: A ``chainer.Link`` with the same persistent arrays on all ranks.
        comm: ChainerMN communicator.

    Example:
        >>> model = L.BatchNormalization(3)
        >>> model.avg_mean[...] = comm.rank
        >>> trainer.extend(chainermn.extensions.AllreducePersistent(model, comm))
        >>> trainer.run()
        >>> model.avg_mean
        array([0.5, 0.5, 0.5], dtype=float32)
    """

    trigger: tuple[int, str] = (1, 'epoch')
    priority: int = chainer.training.extension.PRIORITY_WRITER + 1

    def __init__(self, model: chainer.Link, comm: CommunicatorBase) -> None:
        self.model = model
        self.comm = as_communicator(comm, 'AllreducePersistent(model, comm)')

    def __call__(self, trainer: chainer.training.Trainer | None = None) -> None:
        """Average the arrays.

        Args:
            trainer: Ignored.

        Raises:
            TypeError: On every rank, if the model of any rank is not a ``chainer.Link``.
        """
        with raise_together(self.comm, 'AllreducePersistent'):
            if not hasattr(self.model, 'namedlinks'):
                raise TypeError(f'the model must be a chainer.Link, not {type(self.model)}')
        groups: dict[np.dtype, list[np.ndarray]] = {}
        for array in self._arrays():
            # MPI sums float16 in float32 anyway.
            groups.setdefault(np.promote_types(array.dtype, np.float32), []).append(array)
        for dtype in sorted(groups, key=str):
            self._average(groups[dtype], dtype)

    def _arrays(self) -> list[np.ndarray]:
        named = {}
        for path, link in self.model.namedlinks():
            for name in link._persistent:
                value = link.__dict__[name]
                if isinstance(value, chainer.get_array_types()) and value.dtype.kind == 'f':
                    named[f'{path}/{name}'] = value
        return [named[path] for path in sorted(named)]

    def _average(self, arrays: list[np.ndarray], dtype: np.dtype) -> None:
        """Average arrays together, in one dtype."""
        xp = chainer.backend.get_array_module(*arrays)
        with self.comm.called_by('AllreducePersistent'):
            mean = self.comm.multi_node_mean(xp.concatenate(
                [array.ravel().astype(dtype, copy=False) for array in arrays]))
        start = 0
        for array in arrays:
            array[...] = mean[start:start + array.size].reshape(array.shape)
            start += array.size
