"""The length of an epoch, in samples of one rank or of all ranks."""
from __future__ import annotations

import chainer

from chainermn._types import Object
from chainermn.communicators.communicator_base import CommunicatorBase


def samples_per_epoch(iterator: Object) -> int:
    """Return the number of samples that an iterator of this rank takes per epoch.

    This is not the length of the dataset if the order sampler selects some of the samples, as
    :class:`chainermn.iterators.MultiNodeOrderSampler` does.

    Raises:
        AttributeError, TypeError: If the iterator has no dataset, or a dataset without length.
    """
    # Chainer's iterators compute epoch_detail with this attribute.
    size = getattr(iterator, '_epoch_size', None)
    return len(iterator.dataset) if size is None else size


def is_empty(iterator: Object) -> bool:
    """Return whether an iterator has no samples; false if their number is unknown."""
    try:
        return samples_per_epoch(iterator) == 0
    except (AttributeError, TypeError):
        return False


def count_samples(comm: CommunicatorBase, trainer: chainer.training.Trainer) -> int:
    """Return the number of samples per epoch of all ranks together.

    Collective: every rank calls it.

    Returns:
        The same number on all ranks; 0 if the number is unknown on any rank.
    """
    try:
        samples = samples_per_epoch(trainer.updater.get_iterator('main'))
    except Exception:  # an updater or iterator of a different type
        samples = 0
    by_rank = comm.allgather_obj(samples)
    return sum(by_rank) if all(by_rank) else 0
