"""Read shards on all ranks, to measure the speed and to find broken shards."""
from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from chainermn._commands.check.results import Finding, Report
from chainermn._shards.listing import find_shards
from chainermn._shards.open_shards import Opener, explain, size_of

_SECONDS = 5.  # the time that each rank reads
_CHUNK = 64  # samples to read at once
_SLOW = .25  # a rank is slow if its speed is below this fraction of the median of all ranks
_LONG = 1.  # seconds that a rank must have read to count as slow: at first, opening files dominates
_SHOWN = 5  # broken shards that are listed


class Reading(NamedTuple):
    """The samples and bytes that a rank read."""

    host: str
    samples: int
    n_bytes: int
    seconds: float
    broken: list[tuple[str, str]]  # paths of broken shards, with the errors

    @property
    def rate(self) -> float:
        """The number of samples read per second."""
        return self.samples / max(self.seconds, 1e-9)


def read(pattern: str, host: str, rank: int, size: int) -> Reading:
    """Read the shards of this rank for a few seconds.

    Args:
        pattern: Pattern of the shards, as for :class:`chainermn.iterators.ShardedIterator`.
        host: The name of this host.
        rank: The rank of this process.
        size: The number of ranks.
    """
    opener, broken, samples, n_bytes = Opener(None, 1), [], 0, 0
    start = time.perf_counter()
    try:
        shards = find_shards(pattern)[0]
    except (OSError, ValueError) as error:
        return Reading(host, 0, 0, 0., [(pattern, explain(error))])
    for path in [*shards[rank::size], *shards[:rank]]:  # there may be fewer shards than ranks
        if time.perf_counter() - start > _SECONDS:
            break
        try:
            shard = opener.open(path)
            for begin in range(0, len(shard), _CHUNK):
                shard.read(np.arange(begin, min(begin + _CHUNK, len(shard))))
            samples, n_bytes = samples + len(shard), n_bytes + size_of(path)
            shard.close()
        except Exception as error:  # raised by a library, such as pyarrow
            broken.append((path, explain(error)))
    return Reading(host, samples, n_bytes, time.perf_counter() - start, broken)


def add_to(report: Report, pattern: str, readings: Sequence[Reading]) -> None:
    """Add the readings of all ranks to the report."""
    broken = dict(each for reading in readings for each in reading.broken)
    for path, error in [*broken.items()][:_SHOWN]:
        more = f'; {len(broken)} shards are broken' if len(broken) > 1 else ''
        report.problems.append(Finding('broken-shard', path, f'{path}: {error}{more}'))
    report.warnings += _slow_ranks(readings)
    slowest = min(readings, key=lambda reading: reading.rate)
    if slowest.samples:
        report.hints.append(Finding(
            'reading-speed', pattern,
            f'each rank reads at least {slowest.rate:,.0f} samples/s '
            f'({slowest.n_bytes / slowest.seconds / 1e6:,.0f} MB/s) from {pattern}. If training '
            'needs more, copy the shards to a local disk first.'))


def _slow_ranks(readings: Sequence[Reading]) -> Iterator[Finding]:
    median = statistics.median(reading.rate for reading in readings)
    for rank, reading in enumerate(readings):
        if reading.samples and reading.seconds >= _LONG and reading.rate < _SLOW * median:
            yield Finding('slow-disk', reading.host, (
                f'rank {rank} on {reading.host} reads {reading.rate:,.0f} samples/s, but the '
                f'median of all ranks is {median:,.0f}. Its disk or network is slow, and all ranks '
                'wait for it.'))
