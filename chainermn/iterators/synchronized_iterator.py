"""All ranks read the same batches in the same order, by sharing a seed."""
from __future__ import annotations

import contextlib
from typing import Any

import chainer
import numpy as np

from chainermn._delegate import Delegate
from chainermn.communicators.communicator_base import CommunicatorBase


def create_synchronized_iterator(actual_iterator: Any, communicator: CommunicatorBase) -> Any:
    """Makes the iterators of all ranks shuffle in the same order.

    Collective: every rank calls it.  Afterwards nothing is sent: each rank reads its own data set,
    which should be the same on all, in an order drawn from a seed of rank 0.  For models that span
    several ranks, see also :func:`create_multi_node_iterator`.

    Args:
        actual_iterator: An iterator with an ``order_sampler``, such as
            ``chainer.iterators.SerialIterator``; it starts again from its first batch.
        communicator: ChainerMN communicator.

    Returns:
        A proxy for the iterator.

    Raises:
        ValueError: If the iterator has no ``order_sampler``, on all ranks.
    """
    if not hasattr(actual_iterator, 'order_sampler'):
        communicator.refuse('create_synchronized_iterator', ValueError(
            f'{type(actual_iterator).__name__} has no order_sampler; use SerialIterator, '
            'MultiprocessIterator or MultithreadIterator'))
    seed = None
    if communicator.rank == 0:
        seed = np.random.randint(0, 2**32 - 1, dtype=np.uint32)
    seed = communicator.bcast_obj(seed)
    actual_iterator.order_sampler = chainer.iterators.ShuffleOrderSampler(
        np.random.RandomState(seed))
    actual_iterator.reset()
    return _SynchronizedIterator(actual_iterator)


class _SynchronizedIterator(Delegate, chainer.dataset.Iterator, wraps='actual_iterator'):
    """See :func:`create_synchronized_iterator`."""

    actual_iterator: Any

    def __iter__(self) -> _SynchronizedIterator:
        return self

    def __next__(self) -> Any:
        return next(self.actual_iterator)

    next = __next__

    def finalize(self) -> None:
        self.actual_iterator.finalize()

    def serialize(self, serializer: Any) -> None:
        """Saves or loads the iterator, and the state from which it draws the next orders."""
        self.actual_iterator.serialize(serializer)
        random = self.order_sampler._random
        _, keys, position, _, _ = random.get_state(legacy=True)
        with contextlib.suppress(KeyError):  # a snapshot of an older version
            keys = serializer('order_keys', keys)
            position = serializer('order_position', position)
            random.set_state(('MT19937', keys, position))

    def __del__(self) -> None:
        """Leaves it to the actual iterator, which others may still use."""
