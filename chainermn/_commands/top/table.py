"""The rows of ``top``, one per rank, computed from the samples of the last seconds."""
from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from chainermn._process.streams import printable
from chainermn._timeline.activities import COMMUNICATION, NAMES, WAITING

_WINDOW = 10.  # seconds
_SILENT = 6.  # seconds without a sample before a rank counts as silent
_MAX_WAIT = 5  # messages before the table is shown without a second sample of each rank
_STUCK = 2.  # seconds in one operation, or outside of operations, before the state is shown

#: How much a straggler's share of busy time exceeds the median share of the other ranks.
_MIN_DELAY = .1


class TableRow(NamedTuple):
    """The row of a rank. Unknown values are ``None``."""

    rank: int
    host: str | None = None
    pid: int | None = None
    updates: int | None = None
    updates_per_second: float | None = None
    shares: Mapping[str, float] | None = None  # shares of the time, by activity
    cpu_cores: float | None = None  # number of cores that the rank uses
    rss_bytes: int | None = None
    gpu_bytes: int | None = None  # size of CuPy's pool
    gpu_utilization: float | None = None
    gpu_used_bytes: int | None = None  # used by all processes
    gpu_total_bytes: int | None = None
    log: Mapping[str, float | None] | None = None
    is_silent: bool = True
    is_straggler: bool = False
    is_waiting: bool = False  # in one operation for seconds
    state: str | None = None
    state_seconds: float | None = None

    @property
    def note(self) -> str:
        """The note on the rank; ``''`` if there is none."""
        if self.is_silent:
            return 'does not respond'
        parts = ['straggler'] * self.is_straggler
        if (self.state_seconds or 0) >= _STUCK and (self.is_waiting or self.is_straggler or not (
                self.updates_per_second)):
            parts.append(f'{self.state} (for {self.state_seconds:.0f} s)')
        return '; '.join(parts)


class Samples:
    """The samples of all ranks during the last seconds."""

    def __init__(self) -> None:
        self._samples: dict[int, collections.deque[dict[str, Any]]] = collections.defaultdict(
            collections.deque)
        self._ages: dict[int, float] = {}
        self._size = 0
        self._messages = 0

    def add(self, message: Mapping[str, Any]) -> None:
        """Add a message of the job."""
        self._size = message['size']
        self._messages += 1
        for sample in message['samples']:
            kept = self._samples[sample['rank']]
            self._ages[sample['rank']] = sample['age']
            if kept and kept[-1]['at'] == sample['at']:
                continue  # there is no new sample
            if kept and (kept[-1]['pid'] != sample['pid'] or sum(
                    kept[-1]['seconds'].values()) > sum(sample['seconds'].values())):
                kept.clear()  # the rank had no viewers for a while
            kept.append(sample)
            while len(kept) > 2 and kept[0]['at'] < sample['at'] - _WINDOW:
                kept.popleft()

    @property
    def are_complete(self) -> bool:
        """Whether there are two samples of each rank, or there was enough time for them."""
        return self._messages >= _MAX_WAIT or self._size == sum(
            len(kept) > 1 for kept in self._samples.values())

    def rows(self) -> list[TableRow]:
        """Return the rows of all ranks."""
        ranks = sorted({*self._samples, *range(self._size)})
        rows = [self._row(rank) for rank in ranks]
        slow = straggler(rows)
        return [row._replace(is_straggler=row.rank == slow and not row.is_waiting) for row in rows]

    def _row(self, rank: int) -> TableRow:
        kept = self._samples.get(rank)
        if not kept:
            return TableRow(rank)
        first, last = kept[0], kept[-1]
        row = TableRow(
            rank, printable(last['host']), last['pid'], last['updates'],
            rss_bytes=last['rss_bytes'], gpu_bytes=last['gpu_bytes'],
            log={printable(name): value if math.isfinite(value) else None
                 for name, value in last['log'].items()},
            is_silent=self._ages[rank] > _SILENT,
            is_waiting=last['is_waiting'] and last['state_seconds'] >= _STUCK,
            state=printable(last['state']), state_seconds=last['state_seconds'])
        if last['gpu'] is not None:
            utilization, used, total = last['gpu']
            row = row._replace(gpu_utilization=utilization, gpu_used_bytes=used,
                               gpu_total_bytes=total)
        seconds = last['at'] - first['at']
        if row.is_silent or not seconds:
            return row
        spent = {name: last['seconds'][name] - first['seconds'][name] for name in NAMES}
        total = sum(spent.values())
        rate = None
        if last['updates'] is not None and first['updates'] is not None:
            rate = max(0., (last['updates'] - first['updates']) / seconds)
        shares = {name: each / total for name, each in spent.items()} if total else None
        cores = (last['cpu_seconds'] - first['cpu_seconds']) / seconds
        return row._replace(updates_per_second=rate, shares=shares, cpu_cores=cores)


def straggler(rows: Iterable[TableRow]) -> int | None:
    """Return the rank that the others wait for, or ``None`` if there is none."""
    busy = {row.rank: 1 - row.shares[WAITING] - row.shares[COMMUNICATION]
            for row in rows if row.shares is not None}
    if len(busy) < 2:
        return None
    slowest = max(busy, key=lambda rank: busy[rank])
    others = statistics.median(share for rank, share in busy.items() if rank != slowest)
    return slowest if busy[slowest] - others > _MIN_DELAY else None
