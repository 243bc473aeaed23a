"""Turns the batch normalization of an existing model into that of all ranks."""
from __future__ import annotations

import copy
from typing import Any

import chainer

from chainermn.links.batch_normalization import MultiNodeBatchNormalization


def create_mnbn_model(link: Any, comm: Any, communication_backend: str = 'auto') -> Any:
    """Copies a model with :class:`MultiNodeBatchNormalization` for each ``BatchNormalization``.

    Every rank converts its own; nothing is exchanged.

    Args:
        link: A link; chains, chain lists and ``Sequential`` are searched to any depth.
        comm: ChainerMN communicator.
        communication_backend: ``'mpi'``, ``'nccl'`` (with pure_nccl) or ``'auto'``.

    Returns:
        A deep copy of the link.  Parameters, moving averages and settings are those of the
        original.

    Raises:
        ValueError: If a batch normalization has its own ``axis``.
    """
    return _Converter(comm, communication_backend).replacement(copy.deepcopy(link))


class _Converter:
    """Replaces links in place, each object once, wherever and however often the model holds it."""

    def __init__(self, comm: Any, communication_backend: str) -> None:
        self._comm = comm
        self._communication_backend = communication_backend
        self._done: dict[int, tuple[Any, Any]] = {}  # with the link itself, so that its id stays

    def replacement(self, link: Any) -> Any:
        """Returns what stands in the place of a link; functions stay."""
        if id(link) not in self._done:
            self._done[id(link)] = link, self._replace(link)
        return self._done[id(link)][1]

    def _replace(self, link: Any) -> Any:
        if isinstance(link, MultiNodeBatchNormalization):
            return link
        if isinstance(link, chainer.links.BatchNormalization):
            return _converted(link, self._comm, self._communication_backend)
        if isinstance(link, chainer.ChainList):
            link._children = [self.replacement(child) for child in link._children]
            for i, child in enumerate(link._children):
                child.name = str(i)
            if isinstance(link, chainer.Sequential):
                link._layers = [self.replacement(layer) for layer in link._layers]
        elif isinstance(link, chainer.Chain):
            for name in link._children:
                link.__dict__[name] = self.replacement(link.__dict__[name])
        return link


def _converted(bn: Any, comm: Any, communication_backend: str) -> MultiNodeBatchNormalization:
    if bn.axis is not None:
        raise ValueError('multi-node batch normalization keeps axis 1 (and those of size after '
                         f'it) and takes no axis option, but the model has axis={bn.axis}')
    converted = MultiNodeBatchNormalization(
        bn.avg_mean.shape, comm, bn.decay, bn.eps, bn._highprec_dtype,
        use_gamma=bn.gamma is not None, use_beta=bn.beta is not None,
        communication_backend=communication_backend)
    converted.to_device(bn.device)
    converted.copyparams(bn)
    converted.N = bn.N
    converted.avg_mean[...] = bn.avg_mean
    converted.avg_var[...] = bn.avg_var
    return converted
