"""Time per rank, time per operation, and stragglers."""
from __future__ import annotations

import bisect
import collections
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from chainermn._operations.table import Waits, waiting_for
from chainermn._timeline import bubbles
from chainermn._timeline.trace_files import Event, RankTrace, Run

_RECEIVING = waiting_for(Waits.SENDER)
_COLLECTIVE = waiting_for(Waits.RANKS)

#: A straggler is reported if it delays the others by this fraction of the run.
_MIN_DELAY = .01

#: The span of :class:`chainermn.iterators.ShardedIterator`, and the fraction that warrants advice.
_DATA = 'wait for data'
_MIN_DATA = .05

#: Spans below this fraction of the run have no column in the table.
_MIN_SPAN = .005


class Shares(NamedTuple):
    """The time of a rank's main thread, in seconds, by activity."""

    spans: dict[str, float]  # by name, such as forward; excludes the operations inside
    communicating: float  # time in operations, excluding waiting
    waiting: float  # time that the thread waited for other ranks
    background: float  # communication in other threads


class Straggler(NamedTuple):
    """The delay that a rank caused to the others."""

    rank: int
    seconds: float  # delay, averaged over the other ranks
    last: int  # number of collective calls in which this rank arrived last
    calls: int  # total number of collective calls


class OperationStatistics(NamedTuple):
    """Statistics of all calls of an operation."""

    name: str
    calls: int  # on the rank with the most calls
    seconds: float  # mean duration of a call
    waiting: float  # mean waiting time in a call
    nbytes: float  # mean size of a call, 0 if unknown
    bandwidth: float  # bytes per second, without waiting time; 0 if unknown


def shares(rank: RankTrace) -> Shares:
    """Divide the time of a rank into activities."""
    main = [event for event in rank.events if event.row == 0]
    inside = _merged(event for event in main if event.category)
    waiting = _length(_merged(event for event in main if is_waiting(event)))
    spans: dict[str, float] = collections.defaultdict(float)
    ended = 0.
    for event in main:
        if not event.category and event.begin >= ended:  # nested spans count as the outer one
            spans[bubbles.column(event.name)] += event.seconds - _overlap(event, inside)
            ended = event.end
    background = sum(event.seconds for event in rank.events
                     if event.row > 0 and event.category == 'operation')
    return Shares(dict(spans), _length(inside) - waiting, waiting, background)


def stragglers(run: Run) -> list[Straggler]:
    """Return the delay that each rank caused in collective calls, largest first."""
    arrivals: dict[tuple[str, int], dict[int, float]] = collections.defaultdict(dict)
    for rank in run.ranks:
        for event in rank.events:
            if event.category == 'operation' and event.name in _COLLECTIVE and (
                    'number' in event.details):
                call = str(event.details.get('comm')), int(event.details['number'])
                arrivals[call].setdefault(rank.rank, event.begin)
    calls = [times for times in arrivals.values() if len(times) > 1]
    found = []
    for rank in run.ranks:
        came_last = [times for times in calls if max(times, key=lambda r: times[r]) == rank.rank]
        seconds = sum(times[rank.rank] - statistics.mean(
            time for other, time in times.items() if other != rank.rank) for times in came_last)
        found.append(Straggler(rank.rank, seconds, len(came_last),
                               sum(rank.rank in times for times in calls)))
    return sorted(found, key=lambda one: -one.seconds)


def operations(run: Run) -> list[OperationStatistics]:
    """Return statistics of all operations, the most expensive first."""
    calls: dict[str, list[tuple[int, Event, float]]] = collections.defaultdict(list)
    for rank in run.ranks:
        waits = {row: _merged(event for event in rank.events
                              if event.category == 'wait' and event.row == row)
                 for row in {event.row for event in rank.events}}
        for event in rank.events:
            if event.category == 'operation':
                waited = event.seconds if event.name in _RECEIVING else _overlap(
                    event, waits[event.row])
                calls[event.name].append((rank.rank, event, waited))
    found = []
    for name, of_name in calls.items():
        times = [event.seconds for _, event, _ in of_name]
        waited = sum(waiting for *_, waiting in of_name)
        sizes = [event.details.get('bytes', 0) for _, event, _ in of_name]
        work = sum(times) - waited
        most = collections.Counter(rank for rank, *_ in of_name).most_common(1)[0][1]
        found.append(OperationStatistics(
            name, most, statistics.mean(times), waited / len(times), statistics.mean(sizes),
            sum(sizes) / work if work > 0 else 0.))
    return sorted(found, key=lambda one: -one.seconds * one.calls)


def text(run: Run) -> str:
    """Return the summary as text."""
    by_rank = {rank.rank: shares(rank) for rank in run.ranks}
    delays = stragglers(run)
    lines = [f'{len(run.ranks)} rank{"s" * (len(run.ranks) > 1)}, {run.seconds:.2f} s; maximum '
             f'clock error {run.error * 1e6:.0f} us']
    steps = max(sum(event.name == 'update' and not event.category for event in rank.events)
                for rank in run.ranks)
    if steps:
        lines[0] += f'; {steps} updates, {run.seconds / steps * 1e3:.2f} ms per update'
    names = list(dict.fromkeys(name for each in by_rank.values() for name, seconds
                               in each.spans.items() if seconds > _MIN_SPAN * run.seconds))
    has_background = any(each.background for each in by_rank.values())
    head = ['rank', *map(_printable, names), 'communication', 'waiting', 'other',
            *(['background'] if has_background else []), 'delayed others by']
    delay = {one.rank: one.seconds for one in delays}
    rows = [head]
    for number, each in by_rank.items():
        parts = [*(each.spans.get(name, 0.) for name in names), each.communicating, each.waiting]
        parts.append(max(0., run.seconds - sum(parts)))
        rows.append([str(number),
                     *(f'{seconds:.2f} s {_percent(seconds, run):>4}' for seconds in parts),
                     *([f'{each.background:.2f} s'] if has_background else []),
                     f'{delay[number]:.2f} s'])
    lines += ['', *_table(rows), '']
    rows = [['operation', 'calls', 'ms per call', 'waiting', 'KiB per call', 'GB/s']]
    rows += [[_printable(one.name), str(one.calls), f'{one.seconds * 1e3:.3f}',
              f'{one.waiting * 1e3:.3f}', f'{one.nbytes / 1024:.1f}' if one.nbytes else '',
              f'{one.bandwidth / 1e9:.2g}' if one.bandwidth else ''] for one in operations(run)]
    lines += [*_table(rows), '', *_conclusions(run, by_rank, delays), *bubbles.text(run)]
    return '\n'.join([*lines, *(f'Note: {_printable(note)}' for note in run.notes)])


def _conclusions(run: Run, by_rank: dict[int, Shares], delays: Sequence[Straggler]) -> list[str]:
    """Return advice on the first thing to optimize."""
    return [*_about_ranks(run, by_rank, delays), *_about_data(run, by_rank)]


def _about_data(run: Run, by_rank: dict[int, Shares]) -> list[str]:
    """Return advice if the ranks wait for data."""
    rank, seconds = max(((rank, each.spans.get(_DATA, 0.)) for rank, each in by_rank.items()),
                        key=lambda one: one[1])
    if seconds < _MIN_DATA * run.seconds:
        return []
    return [f'Rank {rank} waited {_percent(seconds, run)} of the time for data: reading takes '
            'longer than the updates. Copy the shards to a local disk, store the results of '
            'transform=, leave a core free for the reading thread, or use larger shards.']


def _about_ranks(run: Run, by_rank: dict[int, Shares], delays: Sequence[Straggler]) -> list[str]:
    if len(run.ranks) < 2:
        return []
    waiting = statistics.mean(each.waiting for each in by_rank.values())
    communicating = statistics.mean(each.communicating for each in by_rank.values())
    lines = [f'{_percent(communicating, run)} of the time was communication, '
             f'{_percent(waiting, run)} waiting for other ranks.']
    worst = delays[0]
    if worst.seconds < _MIN_DELAY * run.seconds:
        return [*lines, f'No rank delays the others by more than {_MIN_DELAY:.0%} of the time.']
    lines.append(f'The other ranks waited for rank {worst.rank}, {worst.seconds:.2f} s each: it '
                 f'arrived last in {worst.last} of {worst.calls} collective calls.')
    mine = by_rank[worst.rank]
    others = [each for number, each in by_rank.items() if number != worst.rank]
    more = {name: seconds - statistics.median(other.spans.get(name, 0.) for other in others)
            for name, seconds in mine.spans.items()}

    def other_time(each: Shares) -> float:
        return run.seconds - sum(each.spans.values()) - each.communicating - each.waiting

    more['code outside any span, such as reading data, extensions and plots'] = (
        other_time(mine) - statistics.median(map(other_time, others)))
    name = max(more, key=lambda name: more[name])
    if more[name] > 0:
        lines.append(f'It spent {more[name]:.2f} s more than the others in {_printable(name)}.')
    return lines


def is_waiting(event: Event) -> bool:
    """Return whether an event is waiting. The whole time of a receive counts as waiting."""
    return event.category == 'wait' or (event.category == 'operation' and event.name in _RECEIVING)


def _merged(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Return the intervals of events, sorted and merged."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted((event.begin, event.end) for event in events):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _length(times: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in times)


def _overlap(event: Event, times: Sequence[tuple[float, float]]) -> float:
    """Return how long an event overlaps the intervals, which are sorted."""
    total = 0.
    for begin, end in times[max(0, bisect.bisect(times, (event.begin,)) - 1):]:
        if begin >= event.end:
            break
        total += max(0., min(end, event.end) - max(begin, event.begin))
    return total


def _percent(seconds: float, run: Run) -> str:
    return f'{seconds / run.seconds if run.seconds else 0:.0%}'


def _printable(text: str) -> str:
    """Replace control characters, because they could manipulate the terminal."""
    return ''.join(c if c.isprintable() else '?' for c in text)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ['  '.join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in rows]
