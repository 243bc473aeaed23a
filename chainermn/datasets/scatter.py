"""Scatters a data set: the root holds all of it, each rank gets its own part.

The part of rank ``r`` of ``s``, for ``n`` examples, is the half-open interval of positions::

    equal lengths:  begins at floor(n r / s), has length ceil(n / s); neighbors share one or none
    otherwise:      length ceil(n / s) on the first n mod s ranks, floor(n / s) on the rest

Neighbors in an array are sent from where they are.  Parts that the root has to copy go out in a few
turns, so that it has the copies of some of them at a time, not of all.  (One copy for a node, in
memory that its ranks share, takes longer and no less memory: the root would write all of it.)
"""
from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
from chainer.datasets import SubDataset

from chainermn.communicators import create_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.datasets._part import NotInMemoryError, cut

#: In how many turns the root sends parts that it has to copy.
_TURNS = 8


class DataSizeError(RuntimeError):
    """Kept for scripts that catch it; nothing raises it."""


def scatter_dataset(
    dataset: Any,
    comm: Any,
    root: int = 0,
    shuffle: bool = False,
    seed: int | None = None,
    max_buf_len: int = 256 * 1024 * 1024,
    *,
    force_equal_length: bool = True,
) -> SubDataset:
    """Gives each rank its own part of the root's data set.

    Collective: every rank calls it.

    What the root sends depends on the type of the data set, as it never reads an example:

    - Arrays, lists, tuples, and ``TupleDataset``, ``DictDataset``, ``SubDataset``,
      ``ConcatenatedDataset`` and ``TransformDataset`` made of these: each rank is sent its own
      part only, arrays as arrays. A transform is sent as it is and runs where the examples are
      used, each time they are.
    - Any other object with ``__len__`` and ``__getitem__``, subclasses of those above too: all of
      it is pickled and sent to all ranks. That is what a data set should be that reads files, such
      as ``LabeledImageDataset``: a list of paths, and no image is opened here.

    Arrays in their order are sent from where they are. Of what is shuffled, and of lists, the root
    has the parts of one eighth of the ranks in memory at a time, or of one rank.

    Args:
        dataset: On the root, the data set. Ignored on the other ranks (pass ``None``).
        comm: ChainerMN or mpi4py communicator.
        root: The rank that has the data set; the same on all ranks.
        shuffle: If true, the examples are put in a random order first.
        seed: Seed of that order, from 0 to 2**32 - 1; another order each time if ``None``.
            The root's counts.
        max_buf_len: Ignored; data sets of any size travel.
        force_equal_length: If true, all parts have the same length, ceil(n / size); where n is no
            multiple of size some examples belong to two parts. If false, each example belongs to
            one part, and lengths differ by one at most. The root's counts.

    Returns:
        This rank's part. On the root it is a view of ``dataset``.

    Raises:
        TypeError: If ``comm`` is not a communicator, or the data set has no length.
        ValueError: If the seed is out of range.
    """
    with _as_communicator(comm) as comm:
        plan, order = _on_root(comm, root, 'scatter_dataset', lambda: _plan(
            dataset, comm.size, shuffle, seed, force_equal_length)) or (None, None)
        shards, at_once = comm.bcast_obj(plan, root=root)
        begin, end = shards[comm.rank]
        if not at_once:
            dataset, order = comm.bcast_obj((dataset, order), root=root)
            return SubDataset(dataset, begin, end, order)
        part = _dealt(dataset, order, shards, at_once, comm, root)
    if comm.rank == root:
        return SubDataset(dataset, begin, end, order)
    return SubDataset(part, 0, end - begin)


def scatter_index(
    n_total_samples: int, comm: Any, root: int = 0, *, force_equal_length: bool = True
) -> tuple[int, int]:
    """Gives each rank its own interval of ``range(n_total_samples)``.

    Collective: every rank calls it. For data that every rank can read by itself; the intervals
    are those of :func:`scatter_dataset`.

    Args:
        n_total_samples: Number of examples. The root's counts.
        comm: ChainerMN or mpi4py communicator.
        root: The rank whose arguments count; the same on all ranks.
        force_equal_length: See :func:`scatter_dataset`. The root's counts.

    Returns:
        ``(begin, end)`` of this rank; ``end`` is not included.

    Raises:
        TypeError: If ``comm`` is not a communicator, or ``n_total_samples`` is not an integer.
        ValueError: If ``n_total_samples`` is negative.
    """
    with _as_communicator(comm) as comm:
        shards = _on_root(comm, root, 'scatter_index', lambda: _shards(
            n_total_samples, comm.size, force_equal_length))
        return comm.scatter_obj(shards, root)


def get_n_iterations_for_one_epoch(dataset: Any, local_batch_size: int, comm: Any) -> int:
    """Number of iterations in which rank 0 goes through its part once.

    Collective: every rank calls it.

    Deprecated: triggers such as ``(1, 'epoch')`` work with several ranks.

    Args:
        dataset: This rank's part. Rank 0's counts.
        local_batch_size: Examples in a batch of one rank. Rank 0's counts.
        comm: ChainerMN or mpi4py communicator.

    Returns:
        ceil(len(dataset) / local_batch_size) of rank 0.
    """
    _warn_deprecated('get_n_iterations_for_one_epoch')
    return _n_iterations(dataset, local_batch_size, comm)


def get_epoch_trigger(
    n_epochs: int, dataset: Any, local_batch_size: int, comm: Any
) -> tuple[int, str]:
    """A Trainer's trigger for every ``n_epochs`` epochs, counted in iterations.

    Collective: every rank calls it.

    Deprecated: triggers such as ``(1, 'epoch')`` work with several ranks.

    Args:
        n_epochs: Number of epochs.
        dataset: This rank's part. Rank 0's counts.
        local_batch_size: Examples in a batch of one rank. Rank 0's counts.
        comm: ChainerMN or mpi4py communicator.

    Returns:
        ``(n_epochs * iterations in an epoch, 'iteration')``.
    """
    _warn_deprecated('get_epoch_trigger')
    return n_epochs * _n_iterations(dataset, local_batch_size, comm), 'iteration'


@contextlib.contextmanager
def _as_communicator(comm: Any) -> Iterator[CommunicatorBase]:
    if isinstance(comm, CommunicatorBase):
        yield comm
        return
    if not hasattr(comm, 'Get_rank'):
        raise TypeError(f'A ChainerMN or mpi4py communicator is needed as comm, got {comm!r}.')
    ours = create_communicator('naive', mpi_comm=comm)
    yield ours
    ours.finalize()  # not after an error: it is collective, and others may not have come as far


def _on_root(comm: CommunicatorBase, root: int, name: str, compute: Callable[[], Any]) -> Any:
    """What ``compute`` gives on the root, ``None`` elsewhere; its error is raised on every rank."""
    if comm.rank != root:
        return None
    try:
        return compute()
    except Exception as error:
        comm.refuse(name, error)


def _plan(
    dataset: Any, size: int, shuffle: bool, seed: int | None, force_equal_length: bool
) -> tuple[tuple[list[tuple[int, int]], int], Any]:
    """On the root: the shards, and to how many ranks to send at once; the order (or ``None``).

    To none if the data set cannot be cut: all ranks get all of it.
    """
    try:
        n = len(dataset)
    except TypeError as error:
        what = 'None' if dataset is None else f'of type {type(dataset).__name__}'
        raise TypeError('the root has to pass a data set that has a length, but what it passed '
                        f'is {what}') from error
    order = numpy.random.RandomState(seed).permutation(n) if shuffle else None
    shards = _shards(n, size, force_equal_length)
    try:
        cut(dataset, numpy.arange(0))
    except NotInMemoryError:
        return (shards, 0), order
    is_copied = shuffle or isinstance(dataset, (list, tuple))  # the examples of a list are pickled
    return (shards, -(-size // _TURNS) if is_copied else size), order


def _dealt(dataset: Any, order: Any, shards: list[tuple[int, int]], at_once: int,
           comm: CommunicatorBase, root: int) -> Any:
    """The part of this rank, sent to it in its turn; ``None`` on the root, which has it."""
    def cut_for(receivers: list[int]) -> list[Any]:
        positions = numpy.arange(len(dataset)) if order is None else order
        return [cut(dataset, positions[begin:end]) if rank in receivers else None
                for rank, (begin, end) in enumerate(shards)]

    mine = None
    others = [rank for rank in range(comm.size) if rank != root]
    for i in range(0, len(others), at_once):
        receivers = others[i:i + at_once]
        part = comm.scatter_obj(
            _on_root(comm, root, 'scatter_dataset', functools.partial(cut_for, receivers)), root)
        if comm.rank in receivers:
            mine = part
    return mine


def _shards(n_total: int, size: int, force_equal_length: bool) -> list[tuple[int, int]]:
    n = operator.index(n_total)
    if n < 0:
        raise ValueError(f'There cannot be {n} examples; pass 0 or more.')
    quotient, remainder = divmod(n, size)
    if force_equal_length:
        length = quotient + (remainder > 0)
        return [(n * rank // size, n * rank // size + length) for rank in range(size)]
    begins = [quotient * rank + min(rank, remainder) for rank in range(size + 1)]
    return list(itertools.pairwise(begins))


def _warn_deprecated(name: str) -> None:
    warnings.warn(f"{name}() is deprecated; use triggers such as (1, 'epoch').",
                  DeprecationWarning, stacklevel=3)


def _n_iterations(dataset: Any, local_batch_size: int, comm: Any) -> int:
    with _as_communicator(comm) as comm:
        return comm.bcast_obj(_on_root(comm, 0, 'get_n_iterations_for_one_epoch', lambda: (
            -(-len(dataset) // local_batch_size))))
