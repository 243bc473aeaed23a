"""Reads the timelines of ranks, aligns their clocks, and writes merged timelines.

A rank that was killed leaves a truncated file; an incomplete last line is ignored. The files are
plain JSON, so reading untrusted files cannot run code.
"""
from __future__ import annotations

import collections
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from chainermn._operations.ranks import ranks_text


class Event(NamedTuple):
    """An activity of a rank. Times are in seconds since the first event of all ranks."""

    name: str
    category: str  # 'operation', 'wait' or ''
    row: int  # number of the thread; the main thread has 0
    begin: float
    end: float
    details: dict[str, Any]

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class RankTrace(NamedTuple):
    """The events of a rank, sorted by row and start time."""

    rank: int
    title: str
    rows: dict[int, str]  # names of threads
    events: list[Event]
    is_complete: bool  # false if the file is truncated


class Run(NamedTuple):
    """The events of all ranks."""

    ranks: list[RankTrace]
    seconds: float
    error: float  # maximum difference of the ranks' clocks, in seconds
    notes: list[str]  # warnings about missing data


class _RawEvent(NamedTuple):
    """An activity of a rank. Times are in microseconds."""

    begin: float
    end: float
    row: int
    name: str
    category: str
    details: dict[str, Any]


class _Clock(NamedTuple):
    at: float  # microseconds, local clock
    offset: float  # to add to the local clock
    error: float


class _File(NamedTuple):
    path: pathlib.Path
    about: dict[str, Any]
    rows: dict[int, str]
    events: list[_RawEvent]
    clocks: dict[str, list[_Clock]]  # by the group of ranks that compared their clocks
    is_complete: bool


def read(paths: Sequence[pathlib.Path]) -> Run:
    """Read timeline files.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If a file is not a timeline.
    """
    notes: list[str] = []
    files = []
    for path in dict.fromkeys(paths):
        file = _parsed(path)
        if file is None:
            notes.append(f'{path} skipped: it contains several ranks (a merged timeline)')
        else:
            files.append(file)
    group = _most_common(files)
    if len(files) > 1:
        for file in files:
            if group not in file.clocks:
                notes.append(f'{file.path} skipped: it is from a different run, or its rank exited '
                             'before the clocks were compared')
        files = [file for file in files if group in file.clocks]
    if not files:
        raise ValueError('none of these files can be used:\n' + '\n'.join(notes))
    files.sort(key=lambda file: int(file.about['rank']))
    missing = sorted(set(range(files[0].about['size'])) - {file.about['rank'] for file in files})
    if missing:
        notes.append(f'missing timeline of {ranks_text(missing)}')
    notes += [f'{file.path} is truncated: rank {file.about["rank"]} failed, was killed, or is '
              'still running' for file in files if not file.is_complete]
    shifted = [_on_one_clock(file, file.clocks.get(group, [])) for file in files]
    first = min((begin for events in shifted for begin, *_ in events), default=0.)
    last = max((end for events in shifted for _, end, *_ in events), default=0.)
    ranks = [
        RankTrace(file.about['rank'], file.about['name'], file.rows,
                  [Event(name, category, row, (begin - first) / 1e6, (end - first) / 1e6, details)
                   for begin, end, row, name, category, details in sorted(events, key=_order)],
                  file.is_complete)
        for file, events in zip(files, shifted, strict=True)]
    errors = [clock.error / 1e6 for file in files for clock in file.clocks.get(group, [])]
    return Run(ranks, (last - first) / 1e6, max(errors, default=0.), notes)


def write(run: Run, path: pathlib.Path) -> None:
    """Write all ranks to one file of Chrome trace events that only this user can read."""
    events: list[dict[str, Any]] = []
    for rank in run.ranks:
        events.append({'ph': 'M', 'pid': rank.rank, 'name': 'process_name',
                       'args': {'name': rank.title}})
        events.append({'ph': 'M', 'pid': rank.rank, 'name': 'process_sort_index',
                       'args': {'sort_index': rank.rank}})
        for row, name in rank.rows.items():
            events.append({'ph': 'M', 'pid': rank.rank, 'tid': row, 'name': 'thread_name',
                           'args': {'name': name}})
            events.append({'ph': 'M', 'pid': rank.rank, 'tid': row, 'name': 'thread_sort_index',
                           'args': {'sort_index': row}})
        events += [{'ph': 'X', 'pid': rank.rank, 'tid': event.row, 'name': event.name,
                    'cat': event.category, 'ts': round(event.begin * 1e6, 3),
                    'dur': round(event.seconds * 1e6, 3), 'args': event.details}
                   for event in rank.events]
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), 'w',
              encoding='utf-8') as file:
        file.write('[\n' + ',\n'.join(map(json.dumps, events)) + '\n]\n')


def _parsed(path: pathlib.Path) -> _File | None:
    """Parse a file; return ``None`` if it contains several ranks."""
    about: list[dict[str, Any]] = []
    found = _File(path, {}, {}, [], collections.defaultdict(list), False)
    is_complete = False
    lines = path.read_text(encoding='utf-8', errors='replace').split('\n')
    for number, line in enumerate(lines, 1):
        text = line.strip().removesuffix(',')
        if text in ('', '[', ']'):
            is_complete = is_complete or text == ']'
            continue
        try:
            _add(json.loads(text), found, about)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            if number < len(lines):
                raise ValueError(f'{path} is not a ChainerMN timeline: cannot parse line '
                                 f'{number}') from error
    if len(about) > 1:
        return None
    if lines[0].strip() != '[' or not about or type(about[0].get('rank')) is not int or (
            type(about[0].get('size')) is not int):
        raise ValueError(f'{path} is not a ChainerMN timeline')
    about[0]['name'] = str(about[0].get('name'))
    return found._replace(about=about[0], is_complete=is_complete)


def _add(event: dict[str, Any], file: _File, about: list[dict[str, Any]]) -> None:
    kind, name, details = event['ph'], event['name'], event.get('args', {})
    if kind == 'M' and name == 'process_name':
        about.append(details)
    elif kind == 'M' and name == 'thread_name':
        file.rows[int(event['tid'])] = str(details['name'])
    elif kind == 'i' and name == 'clock':
        file.clocks[str(details['group'])].append(_Clock(
            float(event['ts']), float(details['offset_us']), float(details['error_us'])))
    elif kind == 'X':
        begin = float(event['ts'])
        file.events.append(_RawEvent(begin, begin + float(event['dur']), int(event['tid']),
                                     str(name), str(event.get('cat', '')), dict(details)))


def _most_common(files: Sequence[_File]) -> str:
    """Return the group of ranks in the most files; if there are several, the latest one."""
    counts = collections.Counter(group for file in files for group in file.clocks)
    return max(counts, key=lambda group: (counts[group], group), default='')


def _on_one_clock(file: _File, clocks: Sequence[_Clock]) -> list[_RawEvent]:
    """Convert times to the clock of the group's first rank, assuming linear drift."""
    if not clocks:
        return list(file.events)
    first, last = clocks[0], clocks[-1]
    drift = (last.offset - first.offset) / (last.at - first.at) if last.at > first.at else 0.

    def shifted(at: float) -> float:
        return at + first.offset + drift * (at - first.at)

    return [event._replace(begin=shifted(event.begin), end=shifted(event.end))
            for event in file.events]


def _order(event: _RawEvent) -> tuple[int, float, float]:
    """Return a sort key that puts an event before the events that it contains."""
    return event.row, event.begin, -event.end
