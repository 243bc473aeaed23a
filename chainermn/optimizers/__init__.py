"""Optimizers whose gradients are means over all ranks: the factory."""
from __future__ import annotations

import operator
from typing import Any

import chainer

from chainermn.communicators import compression as compression_module
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.optimizers._double_buffering_optimizer import _DoubleBufferingOptimizer
from chainermn.optimizers._multi_node_optimizer import _MultiNodeOptimizer
from chainermn.optimizers._overlapping_optimizer import _OverlappingOptimizer

__all__ = ['create_multi_node_optimizer']


def create_multi_node_optimizer(
    actual_optimizer: Any,
    communicator: CommunicatorBase,
    double_buffering: bool = False,
    zero_fill: bool = True,
    *,
    n_accumulations: int = 1,
    compression: Any = None,
    overlap: bool | str = False,
    bucket_mb: float = 25,
) -> Any:
    """Makes an optimizer average its gradients over all ranks before each step.

    Returns a proxy for ``actual_optimizer``: all attributes (``lr``, ``t``, ``target``,
    ``add_hook``, ``serialize``, ...) are those of the actual optimizer, but ``update`` averages.
    The proxy is not an instance of :class:`chainer.Optimizer`; Chainer's updaters take it.

    ``proxy.update(lossfun, *args)`` is collective: every rank calls it. It computes this rank's
    gradients, replaces them by their mean over all ranks, and lets the actual optimizer step.
    Hooks such as ``GradientClipping`` therefore see the mean gradients, equal on all ranks.
    Without ``lossfun`` the gradients must be there already, as with any Chainer optimizer.

    The first ``update`` does not step (``t`` stays 0): it only copies the parameters of rank 0 to
    all ranks. So does an ``update`` that finds more, or other, initialized parameters than the one
    before it, because a layer such as ``Linear(None, 10)`` initializes itself on its first use, on
    each rank with other random numbers.

    Args:
        actual_optimizer: Chainer optimizer, set up with a model or not yet.
        communicator: ChainerMN communicator.
        double_buffering: If true, gradients travel while the next forward and backward are
            computed, and a step uses the gradients of the update before. This can change
            accuracy. Only for communicators that can overlap (``pure_nccl``). The first two
            updates do not step.
        zero_fill: If true, an initialized parameter that this rank's loss did not use (its
            gradient is ``None``) counts as one whose gradient is zero. If false it is skipped, and
            it is an error if some rank has a gradient for it. Parameters that are not initialized
            are always skipped.
        n_accumulations: Number of updates whose gradients make one step: ``update`` adds this
            rank's gradients up, and every ``n_accumulations``-th one averages them over these
            updates and all ranks, and steps.  The others end after backward: ``t`` and the hooks
            do not see them, and the gradients are ``None`` after them.  So two updates with
            ``n_accumulations=2`` are one update with a batch of twice the size.  Without
            ``lossfun``, call ``cleargrads`` before each backward, as always.  An update that
            broadcasts drops what was added up, as does saving and loading; so a snapshot is best
            taken every so many iterations that ``n_accumulations`` divides them.
        compression: How gradients travel: ``None`` (as they are), ``'fp16'``, ``'bf16'``,
            ``'2bit'``, a dict such as ``{'type': '2bit', 'threshold': 0.5}``, or an object of your
            own; see :mod:`chainermn.communicators.compression`.  What ``'2bit'`` did not send yet
            is saved with the optimizer, and belongs to the rank: only a snapshot of each rank, as
            a multi-node checkpointer takes it, holds it for all of them.
        overlap: If true, ``update(lossfun, ...)`` exchanges gradients while backward computes
            others, in buckets, and waits for them before the step.  The results are those without
            it; unlike with double buffering, each step uses the gradients of its own update.
            ``update()`` without ``lossfun`` exchanges everything at once.  It takes a second
            communicator, in the background, and as much memory as the gradients.  Where the ranks,
            on one machine, need all its cores to compute, nothing can be hidden, and everything is
            exchanged at once as well; ``'always'`` overlaps even there.
        bucket_mb: Size of a bucket, in units of 2**20 bytes: a larger one is exchanged more
            efficiently, a smaller one earlier.

    Returns:
        The multi-node optimizer of this rank.

    Raises:
        TypeError: If ``actual_optimizer`` is not a Chainer optimizer, or a multi-node one
            already, or ``communicator`` is not a communicator.
        ValueError: If double buffering is asked of a communicator that cannot overlap, or together
            with ``n_accumulations`` or ``overlap``; or if ``n_accumulations`` is not a positive
            integer, or ``bucket_mb`` not a positive number, or they or ``overlap`` differ between
            the ranks; or if ``compression`` is refused.
    """
    if not isinstance(communicator, CommunicatorBase):
        raise TypeError('create_multi_node_optimizer needs a ChainerMN communicator as its second '
                        f'argument, got {communicator!r}. '
                        'Make one with chainermn.create_communicator().')
    if isinstance(actual_optimizer, _MultiNodeOptimizer):
        communicator.refuse('create_multi_node_optimizer', TypeError(
            'The optimizer is a multi-node optimizer already; pass the Chainer optimizer itself.'))
    if not isinstance(actual_optimizer, chainer.Optimizer):
        communicator.refuse('create_multi_node_optimizer', TypeError(
            'create_multi_node_optimizer needs a chainer.Optimizer as its first argument, got '
            f'{actual_optimizer!r}.'))
    try:
        compressor = compression_module.get(compression)
        n_accumulations = _checked_number(n_accumulations)
        if double_buffering and n_accumulations > 1:
            raise ValueError('double_buffering=True takes no n_accumulations; use one of them')
        if double_buffering and overlap:
            raise ValueError('double_buffering=True and overlap=True are two ways to the same end; '
                             'use overlap=True, which uses fresh gradients')
        if not isinstance(overlap, bool) and overlap != 'always':
            raise ValueError(f"overlap has to be True, False or 'always', not {overlap!r}")
        bucket_bytes = _checked_size(bucket_mb)
    except Exception as error:
        communicator.refuse('create_multi_node_optimizer', error)
    if n_accumulations > 1:
        _check_equal(communicator, 'n_accumulations', n_accumulations)
    # Asked only by those who overlap: the others know nothing of it, and refuse in another way.
    if overlap:
        _check_equal(communicator, 'overlap', overlap)
        _check_equal(communicator, 'bucket_mb', bucket_mb)
        if communicator.size > 1:
            return _OverlappingOptimizer(actual_optimizer, communicator, zero_fill,
                                         n_accumulations, compressor, bucket_bytes,
                                         overlap == 'always')
    if not double_buffering:
        return _MultiNodeOptimizer(actual_optimizer, communicator, zero_fill, n_accumulations,
                                   compressor)
    if not communicator.can_overlap:
        raise ValueError('This communicator does not support double buffering. '
                         'Use pure_nccl, or double_buffering=False.')
    return _DoubleBufferingOptimizer(actual_optimizer, communicator, zero_fill, compressor)


def _checked_number(n_accumulations: Any) -> int:
    if isinstance(n_accumulations, bool) or not hasattr(n_accumulations, '__index__'):
        raise TypeError(f'n_accumulations has to be a positive integer, not {n_accumulations!r}')
    if n_accumulations < 1:
        raise ValueError(f'n_accumulations has to be a positive integer, not {n_accumulations}')
    return operator.index(n_accumulations)


def _checked_size(bucket_mb: Any) -> int:
    """A size in bytes."""
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, (int, float)):
        raise TypeError(f'bucket_mb has to be a positive number, not {bucket_mb!r}')
    if not 0 < bucket_mb < float('inf'):
        raise ValueError(f'bucket_mb has to be a positive number, not {bucket_mb}')
    return max(1, int(bucket_mb * 2**20))


def _check_equal(communicator: CommunicatorBase, name: str, value: Any) -> None:
    values = communicator.allgather_obj(value)
    if len(set(values)) > 1:
        raise ValueError(f'{name} has to be equal on all ranks, but is '
                         + ', '.join(f'{n} on rank {rank}' for rank, n in enumerate(values)))
