"""The open shards of a rank: opens them when needed, retries, and names them in errors."""
from __future__ import annotations

import errno
import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from chainermn._operations.exceptions import ShardError
from chainermn._shards.arrow_files import ParquetShard, open_arrow
from chainermn._shards.npy_files import NpyShard
from chainermn._shards.sample_order import RankSamples
from chainermn._shards.tar_file import TarShard
from chainermn._types import Object

_T = TypeVar('_T')

#: Bytes per rank for all NumPy shards that are open at the same time.
_MEMORY = 2**27

#: Stands for the size of a shard that was not opened.
UNKNOWN = -2

#: Seconds before the second and the third attempt.
_PAUSES = .1, 1.

#: Errors of network file systems after which another attempt may succeed.
_TRANSIENT = {errno.EAGAIN, errno.EBUSY, errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.ETIMEDOUT}


#: Advice for a broken shard, and for a broken sample.
_ADVICE = {'file': 'Replace it', 'reader': 'Correct the reader or replace the shard',
           'sample': 'Correct the sample or transform'}


class Shard(Protocol):
    """An open shard."""

    def __len__(self) -> int: ...
    def read(self, indexes: np.ndarray) -> Sequence[Object]:
        """Return samples."""
    def close(self) -> None:
        """Release its files."""


class Opener:
    """Opens shards with the readers of this package, or with a custom reader.

    Args:
        reader: Function that returns an object with ``len()`` and ``[index]`` for a shard. ``None``
            if the shards are paths or such objects themselves.
        buffer: The number of shards that are open at the same time.
    """

    def __init__(self, reader: Callable[[Object], Object] | None, buffer: int) -> None:
        self.has_reader = reader is not None
        self._reader, self._memory = reader, _MEMORY // buffer

    def open(self, shard: Object) -> Shard:
        """Open a shard."""
        if self._reader is not None:
            return _Samples(self._reader(shard), opened_by_reader=True)
        if not isinstance(shard, str):
            return _Samples(shard, opened_by_reader=False)
        if os.path.isfile(shard) and not os.path.getsize(shard):
            raise ValueError('the file is empty')
        suffix = os.path.splitext(shard)[1]
        if suffix in ('.npy', '.npz'):
            return NpyShard(shard, self._memory)
        if suffix == '.tar':
            return TarShard(shard)
        if suffix in ('.arrow', '.parquet'):
            return ParquetShard(shard) if suffix == '.parquet' else open_arrow(shard)
        kind = f'{suffix!r} files' if suffix else 'files without a suffix'
        raise ValueError(f'no reader for {kind}: pass reader=, a function that opens a path and '
                         'returns an object that supports len() and indexing')

    def measure(self, shard: Object) -> tuple[int, int]:
        """Return the number of samples, and the size in bytes: -1 if the shard is not a file."""
        opened = retried(lambda: self.open(shard))
        try:
            return len(opened), size_of(shard)
        finally:
            opened.close()


class OpenShards:
    """Reads samples and keeps the shards of the current window open.

    Args:
        shards: All shards.
        sizes: The result of :meth:`Opener.measure` for each shard.
        opener: The opener of the shards.
        transform: Function that is applied to each sample, or ``None``.
        is_strict: Whether samples that cannot be read raise an error. Otherwise, they are skipped.
    """

    def __init__(self, shards: Sequence[Object], sizes: Sequence[tuple[int, int]], opener: Opener,
                 transform: Callable[[Object], Object] | None, is_strict: bool) -> None:
        self._shards, self._sizes, self._opener = shards, sizes, opener
        self._transform, self._is_strict = transform, is_strict
        self._open: dict[int, Shard] = {}
        self._broken: set[int] = set()  # broken shards of the current window
        self._reported: set[int] = set()
        self.skipped = 0  # number of skipped samples

    def read(self, part: RankSamples) -> list[Object]:
        """Return the samples of a part.

        Raises:
            ShardError: If a sample cannot be read. It gives the shard and the sample.
        """
        self._broken &= part.window
        for number in [*self._open]:
            if number not in part.window:
                self._open.pop(number).close()
        samples: list[Object] = []
        for number, indexes in part.samples:
            if number in self._broken:
                self.skipped += len(indexes)
                continue
            try:
                samples += retried(functools.partial(self._read, number, indexes))
                continue
            except Exception as caught:
                error = caught
            # Do this outside the handler, so that the traceback does not also show the first error.
            samples += self._read_others(number, indexes, error)
        return samples

    def close(self) -> None:
        """Close all shards."""
        while self._open:
            self._open.popitem()[1].close()

    def _read(self, number: int, indexes: np.ndarray) -> list[Object]:
        if number not in self._open:
            self._open[number] = self._checked(number)
        try:
            samples = self._open[number].read(indexes)
        except OSError:
            self._open.pop(number).close()
            self._open[number] = self._checked(number)
            raise
        if len(samples) != len(indexes):
            raise ValueError(f'the reader returned {len(samples)} samples for {len(indexes)} '
                             'indexes')
        if self._transform is None:
            return [*samples]
        return [self._transform(each) for each in samples]  # map would stop at a StopIteration

    def _read_others(self, number: int, indexes: np.ndarray, error: Exception) -> list[Object]:
        """Report the samples that cannot be read, and return the others."""
        samples: list[Object] = []
        if number not in self._open:
            self._broken.add(number)
            self._note(number, '', error)
            self.skipped += len(indexes)
            return samples
        for i, index in enumerate(indexes.tolist()):
            try:
                samples += self._read(number, indexes[i:i + 1])
            except Exception as found:
                self._note(number, f', sample {index}', found)
                self.skipped += 1
        return samples

    def _checked(self, number: int) -> Shard:
        """Open a shard, and check that its size has not changed since its samples were counted."""
        shard = self._opener.open(self._shards[number])
        now, before = (len(shard), size_of(self._shards[number])), self._sizes[number]
        if now != before and (now[0], UNKNOWN) != before:
            shard.close()
            if self._opener.has_reader and now[1] == before[1]:
                raise ValueError(f'the reader returned {now[0]:,} samples, but according to the '
                                 'index of the shards, or to the first call of the reader, this '
                                 f'shard has {before[0]:,}')
            raise ValueError('the file has changed since its samples were counted: now {:,} '
                             'samples and {:,} bytes, previously {:,} and {:,}'
                             .format(*now, *before))
        return shard

    def _note(self, number: int, sample: str, error: Exception) -> None:
        shard = describe(self._shards[number], number)
        text = f'{shard}{sample}: {explain(error)}' if sample else unopened(shard, error)
        if self._is_strict:
            part = 'sample' if sample else 'reader' if self._opener.has_reader else 'file'
            raise ShardError(f'{text.rstrip(".")}. {_ADVICE[part]}, or pass '
                             "on_error='skip' to ShardedIterator to train without it.") from error
        if number not in self._reported:
            self._reported.add(number)
            logging.getLogger('chainermn').warning('skipped: %s', text)


class _Samples:
    """A shard that is an object of user code with ``len()`` and ``[index]``."""

    def __init__(self, samples: Object, opened_by_reader: bool) -> None:
        if not hasattr(samples, '__len__') or not hasattr(samples, '__getitem__'):
            raise TypeError(
                f'a shard must support len() and indexing, but {type(samples).__name__} does not. '
                'Write a stream to files with chainermn.datasets.write_shards, then read those.')
        self._samples, self._opened_by_reader = samples, opened_by_reader

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, indexes: np.ndarray) -> Sequence[Object]:
        """Return samples; in one call if there is ``__getitems__``, as for PyTorch datasets."""
        numbers = indexes.tolist()
        if hasattr(self._samples, '__getitems__'):
            return self._samples.__getitems__(numbers)
        return [self._samples[i] for i in numbers]

    def close(self) -> None:
        """Close the object if the reader opened it."""
        if self._opened_by_reader and hasattr(self._samples, 'close'):
            self._samples.close()


def retried(function: Callable[[], _T]) -> _T:
    """Call a function, and retry after errors that may be transient."""
    for pause in _PAUSES:
        try:
            return function()
        except OSError as error:
            if error.errno not in _TRANSIENT and not isinstance(
                    error, (ConnectionError, TimeoutError)):
                raise
            time.sleep(pause)
    return function()


def size_of(shard: Object) -> int:
    """Return the size of a file in bytes; -1 if the shard is not a file."""
    return os.path.getsize(shard) if isinstance(shard, str) and os.path.isfile(shard) else -1


def describe(shard: Object, number: int) -> str:
    """Return the name of a shard for messages."""
    return shard if isinstance(shard, str) else f'shard {number} ({type(shard).__name__})'


def unopened(shard: str, error: Exception) -> str:
    """Return the text for a shard that cannot be opened."""
    return f'{shard} cannot be opened: {explain(error)}'


def explain(error: Exception) -> str:
    """Return the type and the text of an error."""
    return f'{type(error).__name__}: {error}' if str(error) else type(error).__name__
