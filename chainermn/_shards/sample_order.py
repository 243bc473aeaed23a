"""The order of all samples, computed from the number of samples in each shard.

In each epoch, the shards are shuffled. Every ``buffer`` consecutive shards form a window, and the
samples of each window are shuffled. All samples of a window come before those of the next window. A
global batch is an interval of this order. Therefore, the order depends on the seed and the epoch,
but not on the ranks; any position can be computed without the positions before it; and the largest
list has one element per sample of a window.

The samples of a global batch are sorted by shard before each rank takes its part. Therefore, a rank
needs only the shards of its part of a window, one or two of which it shares with its neighbors,
instead of all shards. The set of samples in a global batch stays the same, and so does the mean
gradient.
"""
from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

#: The names of the settings that determine an order.
SETTINGS = 'samples', 'shards', 'their counts', 'shuffle', 'seed', 'buffer'


class Interval(NamedTuple):
    """A part of the order of an epoch."""

    epoch: int
    begin: int
    end: int


class RankSamples(NamedTuple):
    """The samples of one window that a rank takes."""

    window: frozenset[int]  # the numbers of the shards in the window
    samples: list[tuple[int, np.ndarray]]  # numbers of shards, each with indexes of samples


class SampleOrder:
    """The order of all samples.

    Args:
        counts: The number of samples in each shard.
        shuffle: Whether to shuffle; otherwise, each epoch has the order of the shards.
        seed: The seed, from 0 to 2**32 - 1.
        buffer: The number of shards whose samples are mixed.
    """

    def __init__(self, counts: Sequence[int], shuffle: bool, seed: int, buffer: int) -> None:
        self.counts = np.array(counts, np.int64)
        self._shuffle, self._seed, self._buffer = shuffle, seed, buffer
        self.length = int(self.counts.sum())
        self._epoch: _Epoch | None = None
        self._window: _Window | None = None

    def with_counts(self, counts: Sequence[int]) -> SampleOrder:
        """Return the order of shards with different numbers of samples."""
        return SampleOrder(counts, self._shuffle, self._seed, self._buffer)

    def settings(self) -> np.ndarray:
        """Return integers that identify an order; :data:`SETTINGS` has their names."""
        return np.array([self.length, len(self.counts), zlib.crc32(self.counts.tobytes()),
                         self._shuffle, self._seed, self._buffer], np.int64)

    def take(self, intervals: Sequence[Interval], rank: int, size: int) -> Iterator[RankSamples]:
        """Yield the samples of a rank, window by window.

        Args:
            intervals: The global batch.
            rank: The rank.
            size: The number of ranks. If it does not divide the size of the global batch, the first
                ranks take one more sample.
        """
        quotient, remainder = divmod(sum(each.end - each.begin for each in intervals), size)
        begin = rank * quotient + min(rank, remainder)
        end = begin + quotient + (rank < remainder)
        for window, positions in self._positions(intervals):
            mine = positions[max(begin, 0):max(end, 0)]
            begin, end = begin - len(positions), end - len(positions)
            if len(mine):
                yield RankSamples(window.members, window.samples(mine))

    def _positions(self, intervals: Sequence[Interval]) -> Iterator[tuple[_Window, np.ndarray]]:
        """Yield each window of a global batch, and the sorted positions in it."""
        for epoch, begin, end in intervals:
            starts = self._of_epoch(epoch).starts
            while begin < end:
                number = int(np.searchsorted(starts, begin, side='right')) - 1
                stop = min(end, int(starts[number + 1]))
                window = self._of_window(epoch, number)
                yield window, window.positions(begin - starts[number], stop - starts[number])
                begin = stop

    def _of_epoch(self, number: int) -> _Epoch:
        if self._epoch is None or self._epoch.number != number:
            shards = np.arange(len(self.counts))
            if self._shuffle:
                np.random.RandomState([self._seed, number]).shuffle(shards)
            ends = np.cumsum(self.counts[shards])
            starts = np.concatenate([[0], ends[self._buffer - 1:-1:self._buffer], ends[-1:]])
            self._epoch = _Epoch(number, shards, starts)
        return self._epoch

    def _of_window(self, epoch: int, number: int) -> _Window:
        if self._window is None or self._window.key != (epoch, number):
            first = number * self._buffer
            shards = self._of_epoch(epoch).shards[first:first + self._buffer]
            order = None
            if self._shuffle:
                n = int(self.counts[shards].sum())
                order = np.arange(n, dtype=np.min_scalar_type(n))
                np.random.RandomState([self._seed, epoch, number]).shuffle(order)
            self._window = _Window((epoch, number), shards, self.counts[shards], order)
        return self._window


class _Epoch(NamedTuple):
    number: int
    shards: np.ndarray  # their numbers, in order
    starts: np.ndarray  # the first position of each window, and the end of the last one


class _Window:
    """Consecutive shards whose samples are mixed."""

    def __init__(self, key: tuple[int, int], shards: np.ndarray, counts: np.ndarray,
                 order: np.ndarray | None) -> None:
        self.key = key  # the epoch, and the number of this window
        self.members = frozenset(shards.tolist())
        self._shards = shards
        self._starts = np.cumsum(counts) - counts
        #: The order of the window's samples, which are numbered across its shards.
        self._order = order

    def positions(self, begin: int, end: int) -> np.ndarray:
        """Return the numbers of the samples in an interval of the order, sorted by shard."""
        return np.arange(begin, end) if self._order is None else np.sort(self._order[begin:end])

    def samples(self, positions: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Return the shards of sorted positions, with indexes in each shard."""
        starts = self._starts
        cuts = np.searchsorted(positions, starts).tolist()
        return [(int(self._shards[i]), positions[begin:end].astype(np.int64) - starts[i])
                for i, (begin, end) in enumerate(itertools.pairwise([*cuts, len(positions)]))
                if end > begin]
