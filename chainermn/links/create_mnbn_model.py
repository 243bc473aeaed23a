"""Turns the batch normalization of an existing model into that of all ranks."""
from __future__ import annotations

import copy
from typing import Any

import chainer

from chainermn.links.batch_normalization import MultiNodeBatchNormalization


def create_mnbn_model(link: Any, comm: Any, communication_backend: str = 'auto') -> Any:
    """Copies a model with :class:`MultiNodeBatchNormalization` for each ``BatchNormalization``.

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
    if isinstance(link, chainer.links.BatchNormalization):
        return _converted(link, comm, communication_backend)
    return _replaced_within(copy.deepcopy(link), comm, communication_backend)


def _replaced_within(link: Any, comm: Any, communication_backend: str) -> Any:
    """Replaces the children of a link, in place."""
    if isinstance(link, chainer.ChainList):
        for i, child in enumerate(link._children):
            link._children[i] = _replacement(child, comm, communication_backend)
        if isinstance(link, chainer.Sequential):
            link._layers = [_replacement(layer, comm, communication_backend)
                            for layer in link._layers]
    elif isinstance(link, chainer.Chain):
        for name in link._children:
            link.__dict__[name] = _replacement(link.__dict__[name], comm, communication_backend)
    return link


def _replacement(child: Any, comm: Any, communication_backend: str) -> Any:
    if isinstance(child, MultiNodeBatchNormalization):
        return child
    if isinstance(child, chainer.links.BatchNormalization):
        return _converted(child, comm, communication_backend)
    return _replaced_within(child, comm, communication_backend)


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
