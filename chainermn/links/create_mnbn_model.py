"""Converts the batch normalizations of an existing model to the multi-node link."""
from __future__ import annotations

import copy
from typing import TypeVar

import chainer

from chainermn._types import Model
from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.functions.batch_normalization import get_communication_backend
from chainermn.links.batch_normalization import MultiNodeBatchNormalization

_Link = TypeVar('_Link', bound=Model)


def create_mnbn_model(link: _Link, comm: CommunicatorBase, communication_backend: str = 'auto'
                      ) -> _Link:
    """Copy a model with each ``BatchNormalization`` replaced by the multi-node link.

    See :class:`MultiNodeBatchNormalization`. Every rank converts its own model. Nothing is sent.

    Args:
        link: A link. All batch normalizations in its chains, chain lists and ``Sequential`` are
            replaced, including in attributes such as a list of layers.
        comm: ChainerMN communicator.
        communication_backend: ``'mpi'``, ``'nccl'`` (with pure_nccl) or ``'auto'``.

    Returns:
        A deep copy of the link, with the same parameters, moving averages and settings.

    Raises:
        TypeError: If ``link`` is not a link.
        ValueError: If a batch normalization has an ``axis`` or is a subclass that overrides
            ``forward``, such as ``BatchRenormalization``, or if the communicator does not support
            the backend.

    Example:
        >>> model = chainer.Sequential(L.Linear(3, 4), L.BatchNormalization(4), F.relu)
        >>> model = chainermn.links.create_mnbn_model(model, comm)
        >>> type(model[1]).__name__
        'MultiNodeBatchNormalization'
    """
    comm = as_communicator(comm, 'create_mnbn_model(link, comm)')
    if not isinstance(link, chainer.Link):
        raise TypeError(f'create_mnbn_model needs a model (chainer.Link), not {link!r}')
    copies: dict[int, object] = {}  # copies by id of the original, which deepcopy uses
    for part in link.links():
        if isinstance(part, chainer.links.BatchNormalization) and not isinstance(
                part, MultiNodeBatchNormalization):
            copies[id(part)] = _converted(part, comm, communication_backend, copies)
    return copy.deepcopy(link, copies)


def _converted(bn: Model, comm: CommunicatorBase, communication_backend: str,
               copies: dict[int, object]) -> MultiNodeBatchNormalization:
    if bn.axis not in (None, (0, *range(2, 1 + len(bn.axis or ())))):
        raise ValueError('multi-node batch normalization averages over all axes except axis 1, but '
                         f'a link has axis={bn.axis}. Remove the axis argument of '
                         'BatchNormalization.')
    if bn.avg_mean is None:
        raise ValueError('multi-node batch normalization needs the number of channels. Pass size '
                         'to BatchNormalization.')
    if type(bn).forward is not chainer.links.BatchNormalization.forward:
        raise ValueError(f'multi-node batch normalization cannot replace {type(bn).__name__}, '
                         'which overrides forward. Use BatchNormalization in the model, or write a '
                         'custom multi-node link.')
    # Copy everything that the user's script added to the link, such as hooks.
    converted = MultiNodeBatchNormalization.__new__(MultiNodeBatchNormalization)
    copies[id(bn)] = converted
    converted.__dict__.update(copy.deepcopy(vars(bn), copies))
    converted.comm = comm
    converted._communication_backend = get_communication_backend(comm, communication_backend)
    return converted
