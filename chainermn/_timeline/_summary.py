"""Where the time went: of each rank, of each operation, and for whom the others waited."""
from __future__ import annotations

import bisect
import collections
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from chainermn._timeline._read import Event, Rank, Run

#: Operations that wait for a message.
_RECEIVING = 'recv', 'recv_obj', 'wait'
_MESSAGES = *_RECEIVING, 'send', 'send_obj', 'isend', 'irecv', 'waitall', 'ask', 'wait for means'

#: Part of the run from which on waiting is worth a word.
_WORTH = .01

#: Part of the run up to which what was named counts with the rest.
_SHORT = .005


class Shares(NamedTuple):
    """Seconds of a rank, in its main thread."""

    spans: dict[str, float]  # of what was named, such as forward; operations inside are not in it
    working: float  # in operations, apart from
    waiting: float  # for other ranks
    background: float  # exchanging in other threads


class Straggler(NamedTuple):
    """For whom the others waited."""

    rank: int
    seconds: float  # that each other rank waited for it, in the mean
    last: int  # how many times it came last
    calls: int  # of how many collective calls


class Verb(NamedTuple):
    """All calls of an operation."""

    name: str
    calls: int  # of the rank that called it most
    seconds: float  # of a call, in the mean
    waiting: float  # of them
    nbytes: float  # of a call, 0 if it is not known
    bandwidth: float  # bytes per second of work, 0 likewise


def shares(rank: Rank) -> Shares:
    """Divides the time of a rank."""
    main = [event for event in rank.events if event.row == 0]
    inside = _merged(event for event in main if event.category)
    waiting = _length(_merged(event for event in main if is_waiting(event)))
    spans: dict[str, float] = collections.defaultdict(float)
    ended = 0.
    for event in main:
        if not event.category and event.begin >= ended:  # what is inside another one is part of it
            spans[event.name] += event.seconds - _overlap(event, inside)
            ended = event.end
    background = sum(event.seconds for event in rank.events
                     if event.row > 0 and event.category == 'verb')
    return Shares(dict(spans), _length(inside) - waiting, waiting, background)


def stragglers(run: Run) -> list[Straggler]:
    """For whom the others waited in collective calls, most first."""
    arrivals: dict[tuple[str, int], dict[int, float]] = collections.defaultdict(dict)
    for rank in run.ranks:
        for event in rank.events:
            if event.category == 'verb' and event.name not in _MESSAGES and (
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


def verbs(run: Run) -> list[Verb]:
    """The operations, those that took longest first."""
    calls: dict[str, list[tuple[int, Event, float]]] = collections.defaultdict(list)
    for rank in run.ranks:
        waits = {row: _merged(event for event in rank.events
                              if event.category == 'wait' and event.row == row)
                 for row in {event.row for event in rank.events}}
        for event in rank.events:
            if event.category == 'verb':
                waited = event.seconds if event.name in _RECEIVING else _overlap(
                    event, waits[event.row])
                calls[event.name].append((rank.rank, event, waited))
    found = []
    for name, members in calls.items():
        times = [event.seconds for _, event, _ in members]
        waited = sum(waiting for *_, waiting in members)
        sizes = [event.details.get('bytes', 0) for _, event, _ in members]
        work = sum(times) - waited
        most = collections.Counter(rank for rank, *_ in members).most_common(1)[0][1]
        found.append(Verb(name, most, statistics.mean(times), waited / len(times),
                          statistics.mean(sizes), sum(sizes) / work if work > 0 else 0.))
    return sorted(found, key=lambda verb: -verb.seconds * verb.calls)


def text(run: Run) -> str:
    """The summary in words and tables."""
    every = {rank.rank: shares(rank) for rank in run.ranks}
    behind = stragglers(run)
    lines = [f'{len(run.ranks)} rank{"s" * (len(run.ranks) > 1)}, {run.seconds:.2f} s; the clocks '
             f'agree within {run.error * 1e6:.0f} us']
    steps = max(sum(event.name == 'update' and not event.category for event in rank.events)
                for rank in run.ranks)
    if steps:
        lines[0] += f'; {steps} updates, one in {run.seconds / steps * 1e3:.2f} ms'
    names = list(dict.fromkeys(name for each in every.values() for name, seconds
                               in each.spans.items() if seconds > _SHORT * run.seconds))
    has_background = any(each.background for each in every.values())
    head = ['rank', *map(_clean, names), 'in verbs', 'waiting', 'rest',
            *(['in background'] if has_background else []), 'others waited for it']
    waited_for = {one.rank: one for one in behind}
    rows = [head]
    for number, each in every.items():
        parts = [*(each.spans.get(name, 0.) for name in names), each.working, each.waiting]
        parts.append(max(0., run.seconds - sum(parts)))
        rows.append([str(number),
                     *(f'{seconds:.2f} s {_percent(seconds, run):>4}' for seconds in parts),
                     *([f'{each.background:.2f} s'] if has_background else []),
                     f'{waited_for[number].seconds:.2f} s'])
    lines += ['', *_table(rows), '']
    rows = [['verb', 'calls', 'ms per call', 'waiting', 'KiB per call', 'GB/s']]
    rows += [[_clean(verb.name), str(verb.calls), f'{verb.seconds * 1e3:.3f}',
              f'{verb.waiting * 1e3:.3f}', f'{verb.nbytes / 1024:.1f}' if verb.nbytes else '',
              f'{verb.bandwidth / 1e9:.2g}' if verb.bandwidth else ''] for verb in verbs(run)]
    lines += [*_table(rows), '', *_verdict(run, every, behind)]
    return '\n'.join([*lines, *(f'Note: {_clean(note)}' for note in run.notes)])


def _verdict(run: Run, every: dict[int, Shares], behind: Sequence[Straggler]) -> list[str]:
    """What to look at first."""
    if len(run.ranks) < 2:
        return []
    waiting = statistics.mean(each.waiting for each in every.values())
    working = statistics.mean(each.working for each in every.values())
    said = [f'Of the time {_percent(working, run)} went into verbs and '
            f'{_percent(waiting, run)} into waiting for other ranks.']
    worst = behind[0]
    if worst.seconds < _WORTH * run.seconds:
        return [*said, f'No rank keeps the others waiting for {_WORTH:.0%} of the time.']
    said.append(f'The others waited for rank {worst.rank}, for {worst.seconds:.2f} s each: it came '
                f'last in {worst.last} of {worst.calls} collective calls.')
    mine = every[worst.rank]
    others = [each for number, each in every.items() if number != worst.rank]
    more = {name: seconds - statistics.median(other.spans.get(name, 0.) for other in others)
            for name, seconds in mine.spans.items()}

    def rest(each: Shares) -> float:
        return run.seconds - sum(each.spans.values()) - each.working - each.waiting

    more['what has no name here, such as reading data, extensions and plots'] = (
        rest(mine) - statistics.median(map(rest, others)))
    name = max(more, key=lambda name: more[name])
    if more[name] > 0:
        said.append(f'It spent {more[name]:.2f} s more than the others in {_clean(name)}.')
    return said


def is_waiting(event: Event) -> bool:
    """Whether it is waiting for other ranks; of a message, all of it, since nobody can tell."""
    return event.category == 'wait' or (event.category == 'verb' and event.name in _RECEIVING)


def _merged(events: Iterable[Event]) -> list[tuple[float, float]]:
    """The times of events, ascending and without overlap."""
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
    """Seconds of an event that are in one of the times, which ascend."""
    total = 0.
    for begin, end in times[max(0, bisect.bisect(times, (event.begin,)) - 1):]:
        if begin >= event.end:
            break
        total += max(0., min(end, event.end) - max(begin, event.begin))
    return total


def _percent(seconds: float, run: Run) -> str:
    return f'{seconds / run.seconds if run.seconds else 0:.0%}'


def _clean(text: str) -> str:
    """Without what could steer a terminal."""
    return ''.join(c if c.isprintable() else '?' for c in text)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ['  '.join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in rows]
