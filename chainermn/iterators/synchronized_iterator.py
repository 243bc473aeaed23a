"""Iterators that read the same batches on all ranks by sharing a seed."""
from __future__ import annotations

from typing import TYPE_CHECKING

import chainer
import numpy as np

from chainermn._operations.on_all_ranks import raise_together
from chainermn._types import Dataset, DatasetIterator, Object, Serializer
from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.optimizers._delegate import Delegate


def create_synchronized_iterator(actual_iterator: DatasetIterator, communicator: CommunicatorBase
                                 ) -> _SynchronizedIterator:
    """Shuffle the iterators of all ranks in the same order.

    Collective: every rank calls it. Afterwards, nothing is sent: each rank reads its own copy of
    the dataset, which should be the same on all ranks, in an order that depends on a random seed of
    rank 0. Each rank draws one number from ``numpy.random``. For models that are split over several
    ranks, see also :func:`create_multi_node_iterator`.

    Args:
        actual_iterator: An iterator with an ``order_sampler``, such as
            ``chainer.iterators.SerialIterator``. It restarts from its first batch.
        communicator: ChainerMN communicator.

    Returns:
        On each rank, a proxy for its iterator.

    Raises:
        ValueError: On all ranks, if the iterator has no ``order_sampler``.

    Example:
        >>> iterator = chainer.iterators.SerialIterator(list(range(100)), 5, shuffle=True)
        >>> iterator = chainermn.iterators.create_synchronized_iterator(iterator, comm)
        >>> mine, theirs = comm.allgather_obj(next(iterator))
        >>> mine == theirs
        True
    """
    communicator = as_communicator(
        communicator, 'create_synchronized_iterator(actual_iterator, communicator)')
    with raise_together(communicator, 'create_synchronized_iterator'):
        if not hasattr(actual_iterator, 'order_sampler'):
            raise ValueError(f'{type(actual_iterator).__name__} has no order_sampler. Use '
                             'SerialIterator, MultiprocessIterator or MultithreadIterator.')
    # Every rank draws a seed, so that identical states of numpy.random stay identical.
    seed = np.random.randint(0, 2**32 - 1, dtype=np.uint32)
    with communicator.called_by('create_synchronized_iterator'):
        seed = communicator.bcast_obj(seed)
    sampler = chainer.iterators.ShuffleOrderSampler(np.random.RandomState(seed))
    actual_iterator.order_sampler = sampler
    if hasattr(actual_iterator, '_prefetch_loop'):  # draws the later orders of MultiprocessIterator
        actual_iterator._prefetch_loop.order_sampler = sampler
    actual_iterator.reset()
    return _SynchronizedIterator(actual_iterator)


class _SynchronizedIterator(Delegate, chainer.dataset.Iterator, wraps='actual_iterator'):
    """See :func:`create_synchronized_iterator`."""

    actual_iterator: DatasetIterator

    if TYPE_CHECKING:  # attributes of the actual iterator, for editors
        dataset: Dataset
        batch_size: int
        repeat: bool
        epoch: int
        is_new_epoch: bool
        epoch_detail: float
        previous_epoch_detail: float | None

        def reset(self) -> None: ...

    def __iter__(self) -> _SynchronizedIterator:
        return self

    def __next__(self) -> Object:
        return next(self.actual_iterator)

    next = __next__

    def finalize(self) -> None:
        """Free the resources of the iterator, such as its processes."""
        self.actual_iterator.finalize()

    def serialize(self, serializer: Serializer) -> None:
        """Save or load the iterator, including the random state for the orders of later epochs.

        Args:
            serializer: A Chainer serializer or deserializer.
        """
        self.actual_iterator.serialize(serializer)

    def __del__(self) -> None:
        """Do nothing: the actual iterator may still be in use."""
