"""Scatters a data set: the root holds all of it, each rank gets its own part.

The part of rank ``r`` of ``s``, for ``n`` examples, is the half-open interval of positions::

    equal lengths:  begins at floor(n r / s), has length ceil(n / s); neighbors share one or none
    otherwise:      length ceil(n / s) on the first n mod s ranks, floor(n / s) on the rest
"""
from __future__ import annotations

import contextlib
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
        plans, order = _on_root(comm, root, 'scatter_dataset', lambda: _plan(
            dataset, comm, shuffle, seed, force_equal_length)) or (None, None)
        begin, end, whole, part = comm.scatter_obj(plans, root)
        if whole:
            dataset, order = comm.bcast_obj((dataset, order), root=root)
    if whole or comm.rank == root:
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
    dataset: Any, comm: CommunicatorBase, shuffle: bool, seed: int | None, force_equal_length: bool
) -> tuple[list[Any], Any]:
    """On the root: what to send to each rank, and the order of the examples (or ``None``)."""
    n = len(dataset)
    positions = numpy.arange(n)
    order = numpy.random.RandomState(seed).permutation(n) if shuffle else None
    shards = _shards(n, comm.size, force_equal_length)
    try:
        return [(begin, end, False, None if rank == comm.rank else
                 cut(dataset, (positions if order is None else order)[begin:end]))
                for rank, (begin, end) in enumerate(shards)], order
    except NotInMemoryError:
        return [(begin, end, True, None) for begin, end in shards], order


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
