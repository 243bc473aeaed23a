"""The batches of a rank: their intervals in the sample order, and their samples."""
from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from chainermn._operations.exceptions import ShardError
from chainermn._shards.open_shards import UNKNOWN, Opener, OpenShards
from chainermn._shards.sample_order import Interval, RankSamples, SampleOrder
from chainermn._types import Object

#: The treatment of the last samples of an epoch if they are fewer than a global batch.
Last = Literal['repeat', 'drop', 'split']


class Position(NamedTuple):
    """The number of completed epochs, and of samples that all ranks took in the current one."""

    epoch: int
    taken: int


#: The number of samples per shard to try if no sample of the first batch can be read.
_ATTEMPTS = 10

#: The position at the end of the only epoch, without ``repeat``.
_END = Position(1, 0)


class PlacedBatch(NamedTuple):
    """A batch of a rank."""

    samples: list[Object]
    after: Position
    skipped: int  # samples that could not be read


@dataclasses.dataclass(frozen=True)
class Batches:
    """All batches of a rank."""

    shards: Sequence[Object]
    sizes: Sequence[tuple[int, int]]  # samples and bytes of each shard
    opener: Opener
    transform: Callable[[Object], Object] | None
    is_strict: bool  # whether samples that cannot be read are errors
    order: SampleOrder
    batch_size: int  # batch size of a rank
    rank: int
    size: int
    repeat: bool
    last: Last

    def read(self, position: Position, reader: int = 0, n_readers: int = 1
             ) -> Iterator[PlacedBatch]:
        """Yield the batches from a position on.

        Args:
            position: The position of the first batch.
            reader: The index of this reader, if several readers read batches in turn.
            n_readers: The number of readers.

        Raises:
            ShardError: If a sample cannot be read.
        """
        order = copy.copy(self.order)  # its caches are not thread-safe
        files = OpenShards(self.shards, self.sizes, self.opener, self.transform, self.is_strict)
        before: list[RankSamples] = []  # the last batch with a readable sample
        try:
            for number in itertools.count():
                if (found := self.next(position)) is None:
                    break
                intervals, position = found
                if number % n_readers != reader:
                    continue
                skipped = files.skipped
                parts = [*order.take(intervals, self.rank, self.size)]
                samples = _read(files, parts)
                skipped = files.skipped - skipped
                if samples:
                    before = parts
                else:  # read again, because user code may have modified the samples
                    samples = _read(files, before) or self._first_readable(files)
                yield PlacedBatch(samples, position, skipped)
        finally:
            files.close()

    def next(self, position: Position) -> tuple[list[Interval], Position] | None:
        """Return the next global batch, and the position after it; ``None`` at the end."""
        epoch, taken = self.position_of_rank(position)
        if epoch and not self.repeat:
            return None
        n, missing = self.order.length, self.batch_size * self.size
        if self.last == 'split':  # with repeat, each rank takes at least one sample
            missing = min(missing, max(n - taken, self.size * self.repeat))
        intervals = []
        while missing:
            end = min(n, taken + missing)
            intervals.append(Interval(epoch, taken, end))
            missing -= end - taken
            taken = end
            if taken == n and missing:
                epoch, taken = epoch + self.repeat, 0
        if taken == n or (self.last == 'drop' and n - taken < self.batch_size * self.size):
            epoch, taken = epoch + 1, 0
        # Without repeat, a batch that wraps around ends the only epoch.
        return intervals, Position(epoch, taken) if self.repeat or len(intervals) == 1 else _END

    def length(self) -> int:
        """Return the number of samples of this rank per epoch, not counting repeated ones."""
        batches, rest = divmod(self.order.length, self.batch_size * self.size)
        if self.last == 'drop':
            rest = 0
        mine = batches * self.batch_size + (rest + self.size - 1 - self.rank) // self.size
        return max(mine, 1) if self.repeat or self.last == 'repeat' else mine

    def position_of_rank(self, position: Position) -> Position:
        """Return the position of this rank, in the next epoch if no samples are left for it.

        The given position is the same on all ranks, so any rank can save it.
        """
        if position.epoch and not self.repeat:
            return position
        needed = 1
        if self.last == 'drop':
            needed = self.batch_size * self.size
        elif self.last == 'split' and not self.repeat:
            needed = self.rank + 1
        is_at_end = self.order.length - position.taken < needed
        return Position(position.epoch + 1, 0) if is_at_end else position

    def in_order_of(self, counts: Sequence[int]) -> Batches:
        """Return batches in the order of an earlier run, whose shards may have been different.

        Args:
            counts: The number of samples of each shard in that run.
        """
        sizes = [size if size[0] == count else (count, UNKNOWN)
                 for count, size in zip(counts, self.sizes, strict=True)]
        return dataclasses.replace(self, sizes=sizes, order=self.order.with_counts(counts))

    def _first_readable(self, files: OpenShards) -> list[Object]:
        """Return a readable sample, for use if the first batch has none."""
        for number, (count, _) in enumerate(self.sizes):
            for i in range(min(count, _ATTEMPTS)):
                part = RankSamples(frozenset([number]), [(number, np.array([i]))])
                if found := files.read(part):
                    return found
        raise ShardError('found no readable sample in the first batch or among the first '
                         f'{_ATTEMPTS} samples of any shard. See the log for the errors.')


def _read(files: OpenShards, parts: Sequence[RankSamples]) -> list[Object]:
    return [sample for part in parts for sample in files.read(part)]
