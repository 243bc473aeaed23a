"""An iterator over a sharded dataset, which may be larger than memory."""
from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Sequence, Sized
from typing import Literal

import chainer
import numpy as np

from chainermn._operations.arguments import is_integer
from chainermn._operations.exceptions import ShardError
from chainermn._operations.on_all_ranks import check_equal, raise_together
from chainermn._shards.batches import Batches, Last, PlacedBatch, Position
from chainermn._shards.listing import Index, find_shards
from chainermn._shards.open_shards import UNKNOWN, Opener, describe, unopened
from chainermn._shards.prefetch import Prefetch
from chainermn._shards.sample_order import SETTINGS, SampleOrder
from chainermn._types import Object, Serializer
from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase

_NAME = 'ShardedIterator'

#: Samples and bytes of a shard that is left out.
_BROKEN = (0, UNKNOWN)


class ShardedIterator(chainer.dataset.Iterator):
    """Reads samples from shards, such as files. Each rank keeps only a few shards in memory.

    Collective: every rank creates one. Afterwards, the ranks do not communicate. ``next()``
    returns a list of ``batch_size`` samples. In each epoch, every sample is in one batch of one
    rank, and all ranks have the same number of batches (see ``last`` for exceptions).

    In each epoch, the shards are shuffled, and then the samples of ``buffer`` shards at a time. The
    order depends only on the seed and the epoch: 4 ranks with a batch size of 8 and 2 ranks with a
    batch size of 16 take the same samples in each step. So a snapshot contains only a position,
    from which any number of ranks can resume with any batch size.

    A thread of each rank reads batches in advance. If it fails, for example because a file is
    damaged, all ranks raise :class:`ShardError`, which gives the file or the sample. Errors of
    network file systems that may be transient (EIO, ESTALE, ETIMEDOUT, ConnectionError and similar)
    are only raised after three attempts. Replacing a shard with one that has the same number of
    samples and bytes is not detected.

    Args:
        shards: A pattern such as ``'train-*.npz'``, which selects exactly the files that match; a
            folder written by ``Dataset.save_to_disk`` of Hugging Face; a list of paths; or a list
            of any objects with a length and ``[index]``. All ranks need access to all shards. The
            type of a sample depends on the suffix of the file:

            - ``.npy``: a row of the array.
            - ``.npz``: a tuple of rows of ``arr_0``, ``arr_1``, ..., or a dict if the arrays have
              different names.
            - ``.tar``: a dict of the files that share a stem, with the extensions as keys and the
              contents as bytes, and the stem as ``'__key__'``, as in WebDataset. Links and sparse
              files are read as tar extracts them.
            - ``.parquet``, ``.arrow``: a dict with one entry per column: NumPy scalars for numbers,
              dates and durations, arrays for lists, ``None`` for null, and for other types, the
              result of pyarrow's ``to_pylist``. These formats need pyarrow.
        batch_size: Number of samples per batch and rank; the same on all ranks.
        comm: ChainerMN communicator.
        repeat: Whether to start the next epoch at the end of one. If not, each pass after
            :meth:`reset` has the same order.
        shuffle: Whether to shuffle. Otherwise, each epoch has the order of the shards.
        seed: Seed of all orders, from 0 to 2**32 - 1.
        buffer: Number of shards whose samples are mixed.
        last: Treatment of the samples at the end of an epoch that do not fill a batch on all
            ranks. ``'repeat'`` completes the batch with the first samples of the next epoch (of
            the same epoch if ``repeat`` is false). ``'drop'`` leaves the samples out. ``'split'``
            makes a smaller batch. If fewer samples than ranks are left for it, the result depends
            on ``repeat``: if true, the batch is completed to one sample per rank; if false, some
            ranks have one batch fewer, so training needs :func:`chainermn.join`. The default is
            ``'repeat'`` if ``repeat`` is true, otherwise ``'split'``.
        n_prefetch: Number of batches to read in advance. With 0, there is no thread.
        n_processes: Number of processes per rank that read in turn. With 0, the thread reads, which
            delays training if the reader or ``transform`` is slow and does not release the GIL. The
            processes are new Python processes without MPI, so a script needs no main guard.
            Cloudpickle serializes the shards, ``reader`` and ``transform`` for them. Each process
            opens the shards that its batches need. Starting the processes takes about a second,
            also after each :meth:`reset`.
        reader: Function that opens a shard: it returns an object with a length and ``[index]``,
            and optionally ``close()`` and ``__getitems__(indexes)``. By default, the suffix of a
            file determines how it is opened.
        transform: Function that maps a sample to a sample, for example to decode an image. It runs
            in the thread or the processes.
        on_error: ``'raise'`` or ``'skip'``, which leaves out samples and shards that cannot be
            read. They are logged, counted, and reported as ``skipped_samples`` and
            ``skipped_shards``. A batch without any readable sample repeats the previous batch. A
            resumed job keeps its order, so skipped shards stay skipped.

    Attributes:
        skipped: Number of samples that this rank left out since the first batch. If a job resumes
            with a different number of ranks, all ranks continue from the number of rank 0.
        skipped_shards: Number of shards that could not be opened when the iterator was created.

    Raises:
        ShardError: On all ranks, if a shard cannot be read.
        FileNotFoundError: On all ranks, if there are no shards, or if a shard that is listed in
            their index is missing.
        TypeError, ValueError: On all ranks, if an argument is invalid or differs between ranks.

    Example:
        >>> data = [(np.full(4, i, 'f'), np.int32(i % 2)) for i in range(100)]
        >>> if comm.rank == 0:
        ...     paths = chainermn.datasets.write_shards(data, 'train', samples_per_shard=10)
        >>> comm.barrier()
        >>> iterator = chainermn.iterators.ShardedIterator('train-*.npz', 5, comm)
        >>> batch = next(iterator)
        >>> len(batch), batch[0][0].shape, iterator.epoch_detail
        (5, (4,), 0.1)
    """

    #: Any rank of any job may load its state; see ``extensions/_checkpointing/progress.py``.
    has_global_position = True

    def __init__(self, shards: Object, batch_size: int, comm: CommunicatorBase,
                 repeat: bool = True, shuffle: bool = True, seed: int = 0, *, buffer: int = 8,
                 last: Last | None = None, n_prefetch: int = 2, n_processes: int = 0,
                 reader: Callable[[Object], Object] | None = None,
                 transform: Callable[[Object], Object] | None = None,
                 on_error: Literal['raise', 'skip'] = 'raise') -> None:
        comm = as_communicator(comm, f'{_NAME}(shards, batch_size, comm)')
        self._comm = comm
        self._source: Prefetch[PlacedBatch] | None = None
        with raise_together(comm, _NAME):
            last, is_strict = last or ('repeat' if repeat else 'split'), on_error == 'raise'
            _check_arguments(batch_size, seed, buffer, n_prefetch, n_processes, last, on_error)
            for name, function in {'reader': reader, 'transform': transform}.items():
                if function is not None and not callable(function):
                    raise TypeError(f'{name} must be a function, not {function!r}')
            found, index = find_shards(shards, is_strict)
        self.batch_size, self.repeat = batch_size, bool(repeat)
        self._n_prefetch, self._n_processes, self._is_strict = n_prefetch, n_processes, is_strict
        with comm.called_by(_NAME):
            by_rank = comm.allgather_obj({
                'shards': _names(found),
                'batch_size': int(batch_size), 'repeat': self.repeat, 'shuffle': bool(shuffle),
                'seed': int(seed), 'buffer': int(buffer), 'last': last, 'on_error': on_error})
        check_equal(comm, by_rank, f'{_NAME}: the arguments differ between ranks',
                    'Pass the same arguments, and shards of the same names, on all ranks.')
        opener = Opener(reader, buffer)
        sizes = _measure(comm, found, index, opener, is_strict)
        self.skipped_shards = sizes.count(_BROKEN)
        order = SampleOrder([n for n, _ in sizes], bool(shuffle), seed, buffer)
        self._batches = Batches(
            found, sizes, opener, transform, is_strict, order, self.batch_size, comm.rank,
            comm.size, self.repeat, last)
        with raise_together(comm, _NAME):
            _check_length(self._batches)
        self.reset()

    def reset(self) -> None:
        """Restart from the first batch of the first epoch.

        The order does not change. To shuffle again in each epoch, use ``repeat=True``, or create
        the iterator in each epoch with ``seed=epoch``.
        """
        self._stop()
        self._position = Position(0, 0)
        self.is_new_epoch = False
        self._previous_epoch_detail = -1.
        self.skipped = 0

    def __next__(self) -> list[Object]:
        """Return the next batch of this rank.

        Raises:
            StopIteration: At the end of the epoch, if ``repeat`` is false.
            ShardError: On all ranks. The other ranks raise it in their next collective operation.
        """
        try:
            if self._source is None or not self._source.is_of_this_process:
                self._source = self._start()
            with self._comm.span('wait for data'):
                batch = self._source.get()
        except BaseException as error:
            self._stop()  # the next call tries again
            if isinstance(error, StopIteration):
                self.is_new_epoch |= self._move(Position(1, 0))
            if isinstance(error, StopIteration) or not isinstance(error, Exception):
                raise
            self._comm.refuse(f'next of {_NAME}', error)
        self._previous_epoch_detail = self.epoch_detail
        self.is_new_epoch = self._move(batch.after)
        self.skipped += batch.skipped
        if not self._is_strict:
            chainer.report({'skipped_samples': self.skipped, 'skipped_shards': self.skipped_shards})
        return batch.samples

    next = __next__

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self._batches.position_of_rank(self._position).epoch

    @property
    def current_position(self) -> int:
        """Number of samples that all ranks together have taken in this epoch."""
        return self._batches.position_of_rank(self._position).taken

    @property
    def epoch_detail(self) -> float:
        """Number of completed epochs, including the completed fraction of the current one."""
        return self.epoch + self.current_position / self._batches.order.length

    @property
    def previous_epoch_detail(self) -> float | None:
        """``epoch_detail`` before the last batch; ``None`` before the first one."""
        return None if self._previous_epoch_detail < 0 else self._previous_epoch_detail

    @property
    def dataset(self) -> Sized:
        """An object whose length is the number of samples of this rank in an epoch."""
        return range(self._epoch_size)

    @property
    def _epoch_size(self) -> int:  # the name in Chainer's iterators
        return self._batches.length()

    def serialize(self, serializer: Serializer) -> None:
        """Save or load the position, which all ranks share.

        Args:
            serializer: A Chainer serializer or deserializer.

        Raises:
            ValueError: If the snapshot was saved with different shards or in a different order.
        """
        is_loading = isinstance(serializer, chainer.Deserializer)
        order, nothing = self._batches.order, np.empty(0, np.int64)
        settings = serializer('settings', order.settings())
        # When a job resumes, different shards may be readable, but the order must not change.
        counts = serializer('counts', None if is_loading else (
            nothing if self._is_strict else order.counts))
        epoch = serializer('epoch', self._position.epoch)
        taken = serializer('current_position', self._position.taken)
        is_new_epoch = serializer('is_new_epoch', self.is_new_epoch)
        previous = serializer('previous_epoch_detail', self._previous_epoch_detail)
        skipped = serializer('skipped', self.skipped)
        if is_loading:
            batches = self._batches
            if not self._is_strict and counts is not None and len(counts) == len(order.counts):
                batches = batches.in_order_of(counts.tolist())
            _check_settings(settings, batches.order.settings())
            self._stop()
            self._batches, self.skipped = batches, int(skipped)
            self._position = Position(int(epoch), int(taken))
            self.is_new_epoch = bool(is_new_epoch)
            self._previous_epoch_detail = float(previous)

    def finalize(self) -> None:
        """Stop the thread and close all files."""
        self._stop()

    def __copy__(self) -> ShardedIterator:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__, _source=None)
        return copied

    def _move(self, position: Position) -> bool:
        """Set the position. Return whether it is in a later epoch."""
        before, self._position = self.epoch, position
        return self.epoch > before

    def _start(self) -> Prefetch[PlacedBatch]:
        if not self._n_processes:
            return Prefetch(self._batches.read(self._position), self._n_prefetch)
        from chainermn.iterators._reader_processes import ReaderProcesses  # few scripts need it

        readers = ReaderProcesses(self._batches, self._position, self._n_processes)
        return Prefetch(readers, self._n_prefetch, readers.interrupt)

    def _stop(self) -> None:
        source, self._source = getattr(self, '_source', None), None
        if source is not None:
            source.close()


def _measure(comm: CommunicatorBase, shards: Sequence[Object], index: Index, opener: Opener,
             is_strict: bool) -> list[tuple[int, int]]:
    """Return the numbers of samples and bytes of all shards, from an index or by opening them.

    Collective: every rank calls it. Each rank opens a part of the shards.
    """
    mine = []
    with raise_together(comm, _NAME):
        for number in range(comm.rank, len(shards), comm.size):
            shard = shards[number]
            try:
                # If not strict, open all shards now, so that all ranks leave out the same ones.
                is_known = is_strict and isinstance(shard, str) and shard in index
                mine.append(index[shard] if is_known else opener.measure(shard))
            except ImportError:
                raise
            except Exception as error:
                text = unopened(describe(shard, number), error)
                if is_strict:
                    raise ShardError(text) from error
                logging.getLogger('chainermn').warning('skipped: %s', text)
                mine.append(_BROKEN)
    with comm.called_by(_NAME):
        by_rank = comm.allgather_obj(mine)
    return [by_rank[i % comm.size][i // comm.size] for i in range(len(shards))]


def _check_arguments(batch_size: Object, seed: Object, buffer: Object, n_prefetch: Object,
                     n_processes: Object, last: Object, on_error: Object) -> None:
    limits = {'batch_size': (batch_size, 1), 'buffer': (buffer, 1), 'n_prefetch': (n_prefetch, 0),
              'n_processes': (n_processes, 0), 'seed': (seed, 0)}
    for name, (value, least) in limits.items():
        if not is_integer(value) or value < least:
            kind = 'positive' if least else 'non-negative'
            raise ValueError(f'{name} must be a {kind} integer, not {value!r}')
    if seed >= 2**32:
        raise ValueError(f'seed must be less than 2**32, not {seed}')
    if last not in ('repeat', 'drop', 'split'):
        raise ValueError(f"last must be 'repeat', 'drop' or 'split', not {last!r}")
    if on_error not in ('raise', 'skip'):
        raise ValueError(f"on_error must be 'raise' or 'skip', not {on_error!r}")


def _check_settings(saved: np.ndarray, present: np.ndarray) -> None:
    different = [f'{name} changed from {before} to {now}' for name, before, now in zip(
        SETTINGS, saved.tolist(), present.tolist(), strict=True) if before != now]
    if different:
        raise ValueError(
            f'{_NAME}: the snapshot was saved with different shards or in a different order, so '
            f'samples would be repeated or skipped: {", ".join(different)}. Use the same shards, '
            'shuffle, seed and buffer.')


def _check_length(batches: Batches) -> None:
    n = batches.order.length
    needed = batches.batch_size * batches.size if batches.last == 'drop' else 1
    if n < needed:
        raise ValueError(f'{len(batches.shards)} shards have {n} samples, but at least {needed} '
                         f'are needed for {batches.size} ranks with batch_size='
                         f'{batches.batch_size} and last={batches.last!r}')


def _names(shards: Sequence[Object]) -> str:
    """Describe shards by their number and the names of their files."""
    names = [os.path.basename(each) for each in shards if isinstance(each, str)]
    if len(names) <= 3:
        return ': '.join([f'{len(shards)}', *([', '.join(names)] if names else [])])
    digest = zlib.crc32('\0'.join(names).encode(errors='surrogateescape'))
    return f'{len(shards)}: {names[0]} to {names[-1]} (digest of all names: {digest:08x})'
