"""An order sampler that shuffles the complete dataset in each epoch, without moving data."""
from __future__ import annotations

import operator
from typing import NamedTuple

import numpy as np

from chainermn._operations.arguments import is_integer
from chainermn._operations.on_all_ranks import check_equal, raise_together
from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase

_MAX_EPOCHS = 10_000  # number of epochs to search for an order that was loaded


class MultiNodeOrderSampler:
    """Reshuffles the dataset in each epoch and gives each rank its share of the samples.

    Collective: every rank creates one. Afterwards, the ranks do not communicate: each computes the
    order of an epoch from the seed and the number of the epoch and takes every ``comm.size``-th
    sample. So each rank needs access to the complete dataset, such as a list of image files, but
    reads only its share of the samples. :func:`chainermn.scatter_dataset`, in contrast, gives a
    rank the same samples in all epochs.

    If the iterator has ``repeat=False``, its ``reset()`` starts with the order of the first epoch.
    To shuffle again in each epoch, create the sampler and the iterator with ``seed=epoch``.

    A snapshot of the iterator contains the order. If the number of ranks has changed, the
    multi-node checkpointer resumes at the same sample: the new ranks share the rest of the epoch.
    (If fewer samples than ranks had been used, the epoch starts again.)

    Args:
        dataset_size: Number of samples of the complete dataset.
        comm: ChainerMN communicator.
        seed: Seed of all orders; a non-negative integer.
        shuffle: Whether to shuffle. Otherwise, each epoch has the order of the dataset.
        even: Whether all ranks have the same number of samples per epoch. If true, up to
            ``comm.size - 1`` samples are repeated at the end of an epoch. If false, some ranks
            have one sample fewer than others, so training needs :func:`chainermn.join`.

    Raises:
        TypeError, ValueError: On all ranks, if an argument is invalid or differs between ranks, or
            if there are fewer samples than ranks.

    Example:
        >>> names = ['a.png', 'b.png', 'c.png', 'd.png']  # the same on all ranks
        >>> sampler = chainermn.iterators.MultiNodeOrderSampler(len(names), comm)
        >>> iterator = chainer.iterators.SerialIterator(names, 2, order_sampler=sampler)
        >>> mine, theirs = comm.allgather_obj(next(iterator))
        >>> sorted(mine + theirs)
        ['a.png', 'b.png', 'c.png', 'd.png']
    """

    def __init__(self, dataset_size: int, comm: CommunicatorBase, seed: int = 0,
                 shuffle: bool = True, even: bool = True) -> None:
        comm = as_communicator(comm, 'MultiNodeOrderSampler(dataset_size, comm)')
        with raise_together(comm, 'MultiNodeOrderSampler'):
            if not is_integer(dataset_size):
                raise TypeError('dataset_size must be the number of samples, such as len(dataset), '
                                f'not {type(dataset_size).__name__}')
            self._n = operator.index(dataset_size)
            self._seed = operator.index(seed)
            if self._seed < 0:
                raise ValueError(f'seed must not be negative, but got {seed}')
            if self._n < comm.size:
                raise ValueError(f'the dataset has {dataset_size} samples, but each of the '
                                 f'{comm.size} ranks needs at least one')
        self._shuffle, self._even = bool(shuffle), bool(even)
        self._rank, self._size = comm.rank, comm.size
        with comm.called_by('MultiNodeOrderSampler'):
            by_rank = comm.allgather_obj({
                'dataset_size': self._n, 'seed': self._seed, 'shuffle': self._shuffle,
                'even': self._even})
        check_equal(comm, by_rank, 'MultiNodeOrderSampler: the arguments differ between ranks',
                    'Pass the same dataset_size, seed, shuffle and even on all ranks.')
        self._epoch = -1  # epoch of the last order

    def __call__(self, current_order: np.ndarray, current_position: int) -> np.ndarray:
        """Return the order of the next epoch. See ``order_sampler`` of Chainer's iterators.

        Args:
            current_order: The order of the current epoch; before the first one, ``0, 1, 2, ...``.
            current_position: Ignored. The samples after it are the last ones of their epoch.

        Returns:
            Indices of this rank's samples.

        Raises:
            ValueError: If the current order was created with different arguments.
        """
        is_first = len(current_order) == self._n and (
            np.array_equal(current_order, np.arange(self._n)))
        self._epoch = 0 if is_first and self._shuffle else self._epoch_of(current_order) + 1
        return self._order(self._epoch)

    def resume(self, order: np.ndarray, position: int, epoch: int, size: int | None) -> _Resumed:
        """Return the order and the position to resume at, given those that any rank saved.

        Args:
            order: The saved order of any rank.
            position: The saved position in it.
            epoch: The saved epoch.
            size: Number of ranks when the order was saved; ``None`` if it has not changed.

        Returns:
            The order of this rank in the same epoch, and the position of its first unused sample.
            Placeholders in the order stand for the used samples.
        """
        first, used = _beginning(order)
        used += max(position - first, 0) * (self._size if size is None else size)
        order = self._order(epoch, min(used, self._n - 1))
        return _Resumed(order, _beginning(order)[0])

    def note_epoch(self, epoch: int) -> None:
        """Set the epoch of the order that is loaded next.

        The multi-node checkpointer calls this method. Without a call, the first epoch with this
        order is used, which may be wrong: if a rank has few samples, several epochs can have
        identical orders.

        Args:
            epoch: The epoch of the iterator that loads the order.
        """
        self._epoch = epoch

    def _epoch_of(self, order: np.ndarray) -> int:
        """Return the epoch of an order, which may come from a snapshot."""
        if not self._shuffle:
            return 0
        used = _beginning(order)[1]
        # If the iterator prefetches, the order may belong to the previous epoch.
        for epoch in (self._epoch, self._epoch - 1, *range(_MAX_EPOCHS)):
            if epoch >= 0 and np.array_equal(order, self._order(epoch, used)):
                return epoch
        if np.array_equal(order, np.arange(len(order))):  # the first order of an iterator
            raise ValueError(f'dataset_size of MultiNodeOrderSampler is {self._n}, but the dataset '
                             f'of the iterator has {len(order)} samples. Pass len(dataset), and '
                             'the whole dataset on all ranks.')
        raise ValueError('the order of the samples was saved with a different order sampler, '
                         'number of ranks, number of samples, seed or "even". Pass the same '
                         'arguments as in the run that saved it.')

    def _order(self, epoch: int, used: int = 0) -> np.ndarray:
        """Return the order of this rank if all ranks together have used ``used`` samples."""
        samples = np.arange(self._n)
        if self._shuffle:
            np.random.RandomState([self._seed, epoch]).shuffle(samples)
        if used < self._size:  # no entry would be left to store this number
            used = 0
        rest = samples[used:]
        length = len(range(self._rank, self._n, self._size))
        if self._even:
            length = -(-self._n // self._size)
            rest = np.concatenate([rest, samples[:-len(rest) % self._size]])
        mine = rest[self._rank::self._size]
        # The length of the order must not change, so placeholders stand for the used samples.
        return np.concatenate([np.full(length - len(mine), -1 - used), mine])


class _Resumed(NamedTuple):
    """The order and the position of an iterator that continues within an epoch."""

    order: np.ndarray
    position: int


def _beginning(order: np.ndarray) -> tuple[int, int]:
    """Return the position of the first sample, and how many samples all ranks used before it.

    The entries before the first sample are ``-1 - used``.
    """
    first = int((np.asarray(order) < 0).sum())
    return first, -1 - int(order[0]) if first else 0
