"""Converts the batch normalization of an existing model to multi-node batch normalization."""
from __future__ import annotations

import copy
from typing import TypeVar

import chainer

from chainermn._types import Model
from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.links.batch_normalization import MultiNodeBatchNormalization

_Link = TypeVar('_Link', bound=Model)


def create_mnbn_model(link: _Link, comm: CommunicatorBase, communication_backend: str = 'auto'
                      ) -> _Link:
    """Copy a model, with each ``BatchNormalization`` replaced by the multi-node one.

    See :class:`MultiNodeBatchNormalization`.  Every rank converts its own model; nothing is sent.

    Args:
        link: A link; chains, chain lists and ``Sequential`` are converted recursively.
        comm: ChainerMN communicator.
        communication_backend: ``'mpi'``, ``'nccl'`` (with pure_nccl) or ``'auto'``.

    Returns:
        A deep copy of the link, with the same parameters, moving averages and settings.

    Raises:
        TypeError: If ``link`` is not a link.
        ValueError: If a batch normalization has an ``axis`` or is a subclass with another
            ``forward``, such as ``BatchRenormalization``, or the communicator does not support the
            backend.

    Example:
        >>> model = chainer.Sequential(L.Linear(3, 4), L.BatchNormalization(4), F.relu)
        >>> model = chainermn.links.create_mnbn_model(model, comm)
        >>> type(model[1]).__name__
        'MultiNodeBatchNormalization'
    """
    comm = as_communicator(comm, 'create_mnbn_model')
    if not isinstance(link, chainer.Link):
        raise TypeError(f'create_mnbn_model needs a model (chainer.Link), not {link!r}')
    return _Converter(comm, communication_backend).replacement(copy.deepcopy(link))


class _Converter:
    """Replaces links in place, each object once, even if the model contains it several times."""

    def __init__(self, comm: CommunicatorBase, communication_backend: str) -> None:
        self._comm = comm
        self._communication_backend = communication_backend
        self._done: dict[int, tuple[Model, Model]] = {}  # by id; keep the link, so its id stays

    def replacement(self, link: Model) -> Model:
        """Return the link that replaces this one; links of other types and functions stay.

        Args:
            link: A link, or a function in a ``Sequential``.
        """
        if id(link) not in self._done:
            self._done[id(link)] = link, self._replace(link)
        return self._done[id(link)][1]

    def _replace(self, link: Model) -> Model:
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


def _converted(bn: Model, comm: CommunicatorBase, communication_backend: str
               ) -> MultiNodeBatchNormalization:
    if bn.axis not in (None, (0, *range(2, 1 + len(bn.axis or ())))):
        raise ValueError('multi-node batch normalization does not support axis: it keeps axis 1, '
                         f'but the model has axis={bn.axis}. Remove the option from the model.')
    if bn.avg_mean is None:
        raise ValueError('multi-node batch normalization needs the number of channels. Pass size '
                         'to BatchNormalization.')
    if type(bn).forward is not chainer.links.BatchNormalization.forward:
        raise ValueError(f'multi-node batch normalization cannot replace {type(bn).__name__}, '
                         'which overrides forward. Use BatchNormalization in the model, or write '
                         'your own multi-node link.')
    converted = MultiNodeBatchNormalization(
        bn.avg_mean.shape, comm, bn.decay, bn.eps, bn._highprec_dtype,
        use_gamma=bn.gamma is not None, use_beta=bn.beta is not None,
        communication_backend=communication_backend)
    converted.to_device(bn.device)
    with converted.init_scope():  # the same parameters, so that links can share them
        converted.gamma, converted.beta = bn.gamma, bn.beta
    converted.N = bn.N
    converted.avg_mean[...] = bn.avg_mean
    converted.avg_var[...] = bn.avg_var
    return converted
