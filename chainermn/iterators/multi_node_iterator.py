"""An iterator that broadcasts the batches of one rank to all ranks."""
from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import chainer

from chainermn._operations.on_all_ranks import raise_on_all_ranks, raise_together
from chainermn._types import Dataset, DatasetIterator, Object, Serializer
from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.iterators._columns import pack, unpack
from chainermn.iterators.sharded_iterator import ShardedIterator
from chainermn.optimizers._delegate import Delegate, unwrap

_MISSING = object()

#: The attributes that Chainer's updaters, triggers and reports read.
_PROGRESS = ('current_position', 'epoch', 'is_new_epoch', 'epoch_detail', 'previous_epoch_detail')


def create_multi_node_iterator(actual_iterator: DatasetIterator, communicator: CommunicatorBase,
                               rank_master: int = 0) -> _MultiNodeIterator:
    """Create an iterator that returns the batches of one rank on all ranks.

    Collective: every rank calls it. ``next()`` and ``reset()`` of the result are also collective,
    and so is loading a snapshot of it. Each broadcasts one message from ``rank_master`` with the
    progress and, for ``next()``, the batch. Use it for a model that is split over several ranks
    that need the same batch. If reading the data on each rank is cheaper than sending it, see
    :func:`create_synchronized_iterator`.

    Args:
        actual_iterator: On ``rank_master``, any iterator whose batches can be pickled. On the
            other ranks, an iterator that only provides its attributes, except for the progress. Its
            batches are never read, so its dataset may come from
            :func:`chainermn.datasets.create_empty_dataset`.
        communicator: ChainerMN communicator.
        rank_master: The rank whose iterator is used; the same on all ranks.

    Returns:
        An iterator. The batches and ``epoch``, ``epoch_detail``, ``previous_epoch_detail``,
        ``is_new_epoch`` and ``current_position`` are the same on all ranks.

    Raises:
        TypeError: If ``communicator`` is not a ChainerMN communicator; or, on all ranks, if
            ``actual_iterator`` of ``rank_master`` is not an iterator.

    Example:
        >>> names = ['a.png', 'b.png', 'c.png', 'd.png']
        >>> if comm.rank == 1:
        ...     names = chainermn.datasets.create_empty_dataset(names)
        >>> iterator = chainer.iterators.SerialIterator(names, 2, shuffle=False)
        >>> iterator = chainermn.iterators.create_multi_node_iterator(iterator, comm)
        >>> next(iterator)  # the same on rank 1
        ['a.png', 'b.png']
    """
    communicator = as_communicator(
        communicator, 'create_multi_node_iterator(actual_iterator, communicator)')
    return _MultiNodeIterator(actual_iterator, communicator, rank_master)


class _MultiNodeIterator(Delegate, chainer.dataset.Iterator, wraps='actual_iterator'):
    """See :func:`create_multi_node_iterator`."""

    actual_iterator: DatasetIterator
    communicator: CommunicatorBase
    rank_master: int

    current_position: int
    epoch: int
    is_new_epoch: bool
    epoch_detail: float
    previous_epoch_detail: float | None
    _order: Object  # order of the examples in this epoch; None if they are not shuffled
    _epoch_size: int  # number of examples in an epoch

    if TYPE_CHECKING:  # attributes of the actual iterator, for editors
        dataset: Dataset
        batch_size: int
        repeat: bool

    def __init__(self, actual_iterator: DatasetIterator, communicator: CommunicatorBase,
                 rank_master: int) -> None:
        super().__init__(actual_iterator)
        self.communicator = communicator
        self.rank_master = rank_master
        self._order = None
        with raise_on_all_ranks(communicator, 'create_multi_node_iterator'):
            if self._is_root and not hasattr(type(actual_iterator), '__next__'):
                raise TypeError(
                    f'create_multi_node_iterator needs an iterator on rank {rank_master}, such as '
                    'chainer.iterators.SerialIterator(dataset, batch_size), not '
                    f'{type(actual_iterator).__name__}')
            if self._is_root and communicator.size > 1 and (
                    isinstance(actual_iterator, ShardedIterator)
                    and actual_iterator._comm is communicator):
                raise ValueError(
                    'create_multi_node_iterator: the ShardedIterator already gives each rank of '
                    'this communicator its own part of the samples, so all ranks would get the '
                    f'part of rank {rank_master} only. Use the ShardedIterator without '
                    'create_multi_node_iterator. To give all ranks the same batches, create the '
                    'ShardedIterator with a communicator that contains only its own rank: '
                    'comm.split(comm.rank, 0).')
        self._share_progress()

    def __iter__(self) -> _MultiNodeIterator:
        return self

    def __next__(self) -> Object:
        batch: Object = None
        message: list[Object] | None = None
        with raise_together(self.communicator, 'next of the multi-node iterator'):
            if self._is_root:
                try:
                    batch = next(self.actual_iterator)
                    message = [pack(batch), self._own_progress()]
                except StopIteration:
                    message = [self._own_progress()]
        *packed, progress = self._bcast(message)
        self.__dict__.update(progress)
        if not packed:
            raise StopIteration
        return batch if self._is_root else unpack(packed[0])

    next = __next__

    def reset(self) -> None:
        """Restart from the first batch. Collective: every rank calls it."""
        if self._is_root:
            self.actual_iterator.reset()
        self._share_progress()

    def serialize(self, serializer: Serializer) -> None:
        """Save or load the iterator of ``rank_master``.

        Every rank saves the progress of ``rank_master``, without communication and in the format
        of Chainer's iterators. So any of these snapshots can be loaded into an ordinary iterator,
        for example in a job with one process. Loading is collective (every rank calls it):
        ``rank_master`` loads its snapshot and broadcasts the progress. The snapshots of the other
        ranks are ignored.

        Args:
            serializer: A Chainer serializer or deserializer.
        """
        if self._is_root:
            self.actual_iterator.serialize(serializer)
        if isinstance(serializer, chainer.Deserializer):
            self._share_progress()
        elif not self._is_root:
            self._save_progress(serializer)

    def finalize(self) -> None:
        """Free the resources of this rank's iterator, such as its processes."""
        self.actual_iterator.finalize()

    def __del__(self) -> None:
        """Do nothing: the actual iterator may still be in use."""

    def __copy__(self) -> _MultiNodeIterator:
        return _MultiNodeIterator(
            copy.copy(self.actual_iterator), self.communicator, self.rank_master)

    @property
    def _is_root(self) -> bool:
        return self.communicator.rank == self.rank_master

    def _own_progress(self, with_order: bool = False) -> dict[str, Object]:
        """Return the progress.

        Args:
            with_order: Whether to include the order even if it has not changed, and the number of
                examples per epoch, which never changes.
        """
        actual = self.actual_iterator
        values = [(name, getattr(actual, name, _MISSING)) for name in _PROGRESS]
        progress = {name: value for name, value in values if value is not _MISSING}
        if with_order or progress.get('is_new_epoch'):
            progress['_order'] = getattr(getattr(actual, '_state', None), 'order', None)
        if with_order and (size := getattr(actual, '_epoch_size', None)) is not None:
            progress['_epoch_size'] = size
        return progress

    def _share_progress(self) -> None:
        progress = self._own_progress(with_order=True) if self._is_root else None
        self.__dict__.update(self._bcast(progress))

    def _bcast(self, obj: Object) -> Object:
        """Broadcast an object of the root."""
        with self.communicator.called_by('create_multi_node_iterator'):
            return self.communicator.bcast_obj(obj, root=self.rank_master)

    def _save_progress(self, serializer: Serializer) -> None:
        for name in ('current_position', 'epoch', 'is_new_epoch'):
            if name in self.__dict__:
                serializer(name, self.__dict__[name])
        if isinstance(unwrap(self.actual_iterator), chainer.iterators.MultithreadIterator):
            # MultithreadIterator loads this name even if the order is None.
            serializer('_order', self._order)
        elif self._order is not None:
            serializer('order', self._order)
        if 'previous_epoch_detail' in self.__dict__:
            detail = self.previous_epoch_detail
            serializer('previous_epoch_detail', -1. if detail is None else detail)
