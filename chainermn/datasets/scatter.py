"""Scatters the dataset of the root: each rank gets its own shard.

The shard of rank ``r`` of ``s``, for ``n`` examples, is the half-open interval of positions::

    equal lengths:  starts at floor(n r / s), has length ceil(n / s); neighbors share at most one
    otherwise:      length ceil(n / s) on the first n mod s ranks, floor(n / s) on the others

Shards that are contiguous in an array are sent without copying. Other shards are sent in several
rounds, so that the root has only the copies of one round in memory. (A single copy per node in
shared memory would take longer and would not save memory, because the root would write all of it.)
"""
from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from chainer.datasets import SubDataset

from chainermn._operations.arguments import is_integer
from chainermn._operations.exceptions import DataSizeError as DataSizeError
from chainermn._operations.on_all_ranks import raise_together
from chainermn._operations.ranks import group_lines, ranks_text
from chainermn._types import Dataset
from chainermn.communicators import create_communicator
from chainermn.communicators._recognize import as_communicator, is_communicator
from chainermn.communicators.communicator_base import CommunicatorBase, CommunicatorLike
from chainermn.datasets import _memory
from chainermn.datasets._part import NotInMemoryError, cut

_T = TypeVar('_T')

#: Start and end of the shard of each rank.
Shards = list[tuple[int, int]]

#: Number of rounds in which the root sends shards that it has to copy.
_ROUNDS = 8


def scatter_dataset(
    dataset: Dataset | None,
    comm: CommunicatorLike,
    root: int = 0,
    shuffle: bool = False,
    seed: int | None = None,
    max_buf_len: int = 256 * 1024 * 1024,
    *,
    force_equal_length: bool = True,
) -> SubDataset:
    """Scatter the root's dataset: each rank gets its own shard.

    Collective: every rank calls it.

    The root never reads an example. The data that it sends depends on the type of the dataset:

    - Arrays, lists, tuples, and ``TupleDataset``, ``DictDataset``, ``SubDataset``,
      ``ConcatenatedDataset`` and ``TransformDataset`` of these: each rank gets only its own
      shard. Arrays are sent as arrays. Transforms are sent as functions, which run each time that
      an example is used.
    - Other objects with ``__len__`` and ``__getitem__``, including subclasses of these types: the
      whole dataset is pickled and sent to all ranks. So a dataset of files should be a list of
      paths, like ``LabeledImageDataset``; scattering does not open any image.

    If the ranks of a node would receive more data than fits into its free memory, nothing is sent.
    To read datasets that do not fit from files, use
    :class:`chainermn.iterators.ShardedIterator`.

    Arrays that are not shuffled are sent without copying. For shuffled datasets and for lists, the
    root copies the shards of one rank, or of one eighth of the ranks, at a time.

    Args:
        dataset: On the root, the dataset. Ignored on the other ranks (pass ``None``). The root
            warns if another rank passes a dataset of a different length with at least two
            examples.
        comm: ChainerMN or mpi4py communicator.
        root: The rank that has the dataset; the same on all ranks.
        shuffle: Whether to shuffle the examples first. Only the root's argument is used.
        seed: Seed for shuffling, from 0 to 2**32 - 1; ``None`` shuffles differently each time.
            Only the root's argument is used.
        max_buf_len: Ignored; datasets of any size are supported.
        force_equal_length: If true, all shards have the same length, ceil(n / size); if n is not a
            multiple of size, some examples belong to two shards. If false, each example belongs to
            one shard, and lengths differ by at most one. Only the root's argument is used.

    Returns:
        This rank's shard. On the root, it is a view of ``dataset``.

    Raises:
        TypeError: If ``comm`` is not a communicator, or the dataset has no length.
        ValueError: If the seed is out of range.
        DataSizeError: On all ranks, if the dataset is too large. The message shows the estimated
            size and free memory.

    Example:
        >>> names = ['a.png', 'b.png', 'c.png', 'd.png'] if comm.rank == 0 else None
        >>> shard = chainermn.scatter_dataset(names, comm)
        >>> shard[:]  # ['c.png', 'd.png'] on rank 1
        ['a.png', 'b.png']
    """
    data = cast(Dataset, dataset)  # not None on the root
    with _as_communicator(comm, 'scatter_dataset') as ours:
        ranks = ours.gather_obj((_length(data), _memory.NodeMemory.here()), root)
        own_plan, order = _on_root(ours, root, 'scatter_dataset', lambda: _plan(
            data, ours.size, shuffle, seed, force_equal_length, ranks or (), root)) or (None, None)
        plan: _ScatterPlan = ours.bcast_obj(own_plan, root=root)
        begin, end = plan.shards[ours.rank]
        if not plan.at_once:
            data, order = ours.bcast_obj((data, order), root=root)
        else:
            shard = _scattered(data, order, plan, ours, root)
    if ranks is not None:  # at the end, because a filter may turn the warning into an error
        _warn_of_ignored_datasets([length for length, _ in ranks], root)
    if ours.rank == root or not plan.at_once:
        return SubDataset(data, begin, end, order)
    return SubDataset(shard, 0, end - begin)


def scatter_index(
    n_total_samples: int, comm: CommunicatorLike, root: int = 0, *, force_equal_length: bool = True
) -> tuple[int, int]:
    """Return this rank's interval of ``range(n_total_samples)``.

    Collective: every rank calls it. Use this function for data that every rank can read.
    The intervals are the same as in :func:`scatter_dataset`.

    Args:
        n_total_samples: Number of examples. Only the root's argument is used.
        comm: ChainerMN or mpi4py communicator.
        root: The rank whose arguments are used; the same on all ranks.
        force_equal_length: See :func:`scatter_dataset`. Only the root's argument is used.

    Returns:
        ``(begin, end)`` of this rank; ``end`` is exclusive.

    Raises:
        TypeError: If ``comm`` is not a communicator, or ``n_total_samples`` is not an integer.
        ValueError: If ``n_total_samples`` is negative.

    Example:
        >>> begin, end = chainermn.scatter_index(10, comm)
        >>> begin, end  # 5, 10 on rank 1
        (0, 5)
    """
    with _as_communicator(comm, 'scatter_index') as ours:
        shards = _on_root(ours, root, 'scatter_index', lambda: _shards(
            n_total_samples, ours.size, force_equal_length))
        return ours.scatter_obj(shards, root)


def get_n_iterations_for_one_epoch(dataset: Sized, local_batch_size: int, comm: CommunicatorLike
                                   ) -> int:
    """Return the number of iterations in which rank 0 reads its shard once.

    Collective: every rank calls it.

    Deprecated: triggers such as ``(1, 'epoch')`` work with several ranks.

    Args:
        dataset: This rank's shard. Only rank 0's argument is used.
        local_batch_size: Number of examples in a batch of one rank. Only rank 0's argument is used.
        comm: ChainerMN or mpi4py communicator.

    Returns:
        ceil(len(dataset) / local_batch_size), as computed on rank 0.
    """
    _warn_deprecated('get_n_iterations_for_one_epoch')
    return _n_iterations(dataset, local_batch_size, comm)


def get_epoch_trigger(
    n_epochs: int, dataset: Sized, local_batch_size: int, comm: CommunicatorLike
) -> tuple[int, str]:
    """Return a trigger that fires every ``n_epochs`` epochs, counted in iterations.

    Collective: every rank calls it.

    Deprecated: triggers such as ``(1, 'epoch')`` work with several ranks.

    Args:
        n_epochs: Number of epochs.
        dataset: This rank's shard. Only rank 0's argument is used.
        local_batch_size: Number of examples in a batch of one rank. Only rank 0's argument is used.
        comm: ChainerMN or mpi4py communicator.

    Returns:
        ``(n_epochs * iterations per epoch, 'iteration')``.
    """
    _warn_deprecated('get_epoch_trigger')
    return n_epochs * _n_iterations(dataset, local_batch_size, comm), 'iteration'


@contextlib.contextmanager
def _as_communicator(comm: CommunicatorLike, caller: str) -> Iterator[CommunicatorBase]:
    if is_communicator(comm):
        ours = as_communicator(comm, caller)
        with ours.called_by(caller):
            yield ours
        return
    if not hasattr(comm, 'Get_rank'):
        raise TypeError(f'{caller}: comm must be a ChainerMN or mpi4py communicator, not '
                        f'{type(comm).__name__}. Check the order of the arguments.')
    ours = create_communicator('naive', mpi_comm=cast(Any, comm))
    yield ours
    ours.finalize()  # not after an error, because other ranks may not reach this collective call


def _on_root(comm: CommunicatorBase, root: int, name: str, compute: Callable[[], _T]) -> _T | None:
    """Return the result on the root and ``None`` elsewhere; all ranks raise the root's error."""
    with raise_together(comm, name):
        result = compute() if comm.rank == root else None
    return result


class _ScatterPlan(NamedTuple):
    shards: Shards
    at_once: int  # number of ranks that get shards in one round; 0 if all ranks get everything


def _plan(dataset: Dataset, size: int, shuffle: bool, seed: int | None, force_equal_length: bool,
          ranks: Sequence[tuple[int, _memory.NodeMemory]], root: int
          ) -> tuple[_ScatterPlan, np.ndarray | None]:
    """Return the plan and the order of the examples (``None`` if not shuffled), on the root."""
    try:
        n = len(dataset)
    except TypeError as error:
        if dataset is not None:
            raise TypeError(f'the dataset of rank {root}, the root, has no length (its type is '
                            f'{type(dataset).__name__}). Pass a dataset with __len__.') from error
        others = [rank for rank, (length, _) in enumerate(ranks) if length]
        raise TypeError(
            f'rank {root}, the root, passed None. Pass the dataset on rank {root}' + (
                f'; or pass root={others[0]} on all ranks, because rank {others[0]} passed a '
                'dataset.' if others else ' and None on the other ranks.')) from None
    nodes = [node for _, node in ranks]
    order = _random_state(seed).permutation(n) if shuffle else None
    shards = _shards(n, size, force_equal_length)
    try:
        cut(dataset, np.arange(0))
    except NotInMemoryError:
        _memory.check(_memory.estimate(dataset), [1.] * size, nodes, root)
        return _ScatterPlan(shards, 0), order
    shares = [(end - begin) / max(n, 1) for begin, end in shards]
    _memory.check(_memory.estimate(dataset), shares, nodes, root)
    is_copied = shuffle or isinstance(dataset, (list, tuple))  # the examples of a list are pickled
    return _ScatterPlan(shards, -(-size // _ROUNDS) if is_copied else size), order


def _random_state(seed: int | None) -> np.random.RandomState:
    try:
        return np.random.RandomState(seed)
    except (TypeError, ValueError) as error:
        raise type(error)(f'seed must be an integer from 0 to 2**32 - 1, or None, not {seed!r}'
                          ) from error


def _length(dataset: Dataset) -> int:
    """Return the length of a dataset; 0 for ``None`` and objects without a length."""
    try:
        return len(dataset)
    except Exception:  # raised by user code, so of any type
        return 0


def _warn_of_ignored_datasets(lengths: Sequence[int], root: int) -> None:
    """Warn on the root if other ranks passed different datasets, which are ignored.

    User code may pass the same dataset on all ranks, an empty dataset or a placeholder.
    """
    others = [rank for rank, length in enumerate(lengths) if length not in (0, 1, lengths[root])]
    if others:
        warnings.warn('\n'.join([
            f'scatter_dataset ignored the datasets passed by {ranks_text(others)}; it only '
            f'scatters the dataset of the root, rank {root}. Lengths:',
            *group_lines(enumerate(map(str, lengths))),
            'Pass the whole dataset on the root and None on the other ranks. If each rank has its '
            'own data, do not call scatter_dataset.']), RuntimeWarning, stacklevel=3)


def _scattered(dataset: Dataset, order: np.ndarray | None, plan: _ScatterPlan,
               comm: CommunicatorBase, root: int) -> Dataset | None:
    """Send the shards in rounds; return this rank's shard, or ``None`` on the root."""
    def cut_for(receivers: list[int]) -> list[Dataset | None]:
        positions = np.arange(len(dataset)) if order is None else order
        return [cut(dataset, positions[begin:end]) if rank in receivers else None
                for rank, (begin, end) in enumerate(plan.shards)]

    mine = None
    others = [rank for rank in range(comm.size) if rank != root]
    for i in range(0, len(others), plan.at_once):
        receivers = others[i:i + plan.at_once]
        shard = comm.scatter_obj(
            _on_root(comm, root, 'scatter_dataset', functools.partial(cut_for, receivers)), root)
        if comm.rank in receivers:
            mine = shard
    return mine


def _shards(n_total: int, size: int, force_equal_length: bool) -> Shards:
    if not is_integer(n_total):
        is_sized = hasattr(n_total, '__len__')
        raise TypeError('n_total_samples must be an integer, not ' + (
            f'{type(n_total).__name__}; pass the length of the dataset' if is_sized
            else repr(n_total)))
    n = operator.index(n_total)
    if n < 0:
        raise ValueError(f'n_total_samples must not be negative, but is {n}')
    quotient, remainder = divmod(n, size)
    if force_equal_length:
        length = quotient + (remainder > 0)
        return [(n * rank // size, n * rank // size + length) for rank in range(size)]
    begins = [quotient * rank + min(rank, remainder) for rank in range(size + 1)]
    return list(itertools.pairwise(begins))


def _warn_deprecated(name: str) -> None:
    warnings.warn(f"{name}() is deprecated; use triggers such as (1, 'epoch').",
                  DeprecationWarning, stacklevel=3)


def _n_iterations(dataset: Sized, local_batch_size: int, comm: CommunicatorLike) -> int:
    with _as_communicator(comm, 'get_n_iterations_for_one_epoch') as ours:
        return ours.bcast_obj(_on_root(ours, 0, 'get_n_iterations_for_one_epoch', lambda: (
            -(-len(dataset) // local_batch_size))))
