"""Reads the timelines of ranks, and puts them on one clock.

A rank that was killed leaves a file without an end, whose last line may be cut; that line is
missing then.  Only JSON is read: a file can say something wrong, but do nothing.
"""
from __future__ import annotations

import collections
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple


class Event(NamedTuple):
    """What a rank did.  Times are in seconds since the first event of all ranks."""

    name: str
    category: str  # 'verb', 'wait' or ''
    row: int  # of its thread; the main thread has 0
    begin: float
    end: float
    details: dict[str, Any]

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Rank(NamedTuple):
    """What a rank did, each row by its begin."""

    rank: int
    title: str
    rows: dict[int, str]  # names of threads
    events: list[Event]
    is_whole: bool  # whether the file has an end


class Run(NamedTuple):
    """What all ranks did."""

    ranks: list[Rank]
    seconds: float
    error: float  # seconds by which the clocks of two ranks may differ
    notes: list[str]  # what is missing


class _Clock(NamedTuple):
    at: float  # microseconds, by the clock of the rank, as the others
    offset: float  # to be added
    error: float


class _File(NamedTuple):
    path: pathlib.Path
    about: dict[str, Any]
    rows: dict[int, str]
    events: list[tuple[float, float, int, str, str, dict[str, Any]]]
    clocks: dict[str, list[_Clock]]  # by group of ranks whose clocks were compared
    is_whole: bool


def read(paths: Sequence[pathlib.Path]) -> Run:
    """Reads the files of ranks.

    Raises:
        OSError: If one cannot be read.
        ValueError: If one is no timeline.
    """
    notes: list[str] = []
    files = []
    for path in dict.fromkeys(paths):
        file = _parsed(path)
        if file is None:
            notes.append(f'{path} has several ranks already, and is left out')
        else:
            files.append(file)
    group = _most_common(files)
    if len(files) > 1:
        for file in files:
            if group not in file.clocks:
                notes.append(f'{file.path} is of another run, or its rank ended before the clocks '
                             'were compared; it is left out')
        files = [file for file in files if group in file.clocks]
    if not files:
        raise ValueError('none of these files can be shown:\n' + '\n'.join(notes))
    files.sort(key=lambda file: int(file.about['rank']))
    missing = sorted(set(range(files[0].about['size'])) - {file.about['rank'] for file in files})
    if missing:
        notes.append(f'there is no timeline of rank {", ".join(map(str, missing))}')
    notes += [f'{file.path} has no end: rank {file.about["rank"]} failed or was killed, or is '
              'still running' for file in files if not file.is_whole]
    shifted = [_on_one_clock(file, file.clocks.get(group, [])) for file in files]
    first = min((begin for events in shifted for begin, *_ in events), default=0.)
    last = max((end for events in shifted for _, end, *_ in events), default=0.)
    ranks = [
        Rank(file.about['rank'], file.about['name'], file.rows,
             [Event(name, category, row, (begin - first) / 1e6, (end - first) / 1e6, details)
              for begin, end, row, name, category, details in sorted(events, key=_order)],
             file.is_whole)
        for file, events in zip(files, shifted, strict=True)]
    errors = [clock.error / 1e6 for file in files for clock in file.clocks.get(group, [])]
    return Run(ranks, (last - first) / 1e6, max(errors, default=0.), notes)


def write(run: Run, path: pathlib.Path) -> None:
    """Writes all ranks into one file, as Chrome's trace events; for this user only."""
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
    """What is in a file; ``None`` if that is several ranks."""
    about: list[dict[str, Any]] = []
    found = _File(path, {}, {}, [], collections.defaultdict(list), False)
    is_whole = False
    lines = path.read_text(encoding='utf-8', errors='replace').split('\n')
    for number, line in enumerate(lines, 1):
        text = line.strip().removesuffix(',')
        if text in ('', '[', ']'):
            is_whole = is_whole or text == ']'
            continue
        try:
            _take(json.loads(text), found, about)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            if number < len(lines):
                raise ValueError(f'{path} is no timeline of ChainerMN: line {number} cannot be '
                                 'read') from error
    if len(about) > 1:
        return None
    if lines[0].strip() != '[' or not about or type(about[0].get('rank')) is not int or (
            type(about[0].get('size')) is not int):
        raise ValueError(f'{path} is no timeline of ChainerMN')
    return found._replace(about=about[0] | {'name': str(about[0].get('name'))}, is_whole=is_whole)


def _take(event: dict[str, Any], file: _File, about: list[dict[str, Any]]) -> None:
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
        file.events.append((begin, begin + float(event['dur']), int(event['tid']), str(name),
                            str(event.get('cat', '')), dict(details)))


def _most_common(files: Sequence[_File]) -> str:
    """The group of ranks that most files know; of several, the latest."""
    counts = collections.Counter(group for file in files for group in file.clocks)
    return max(counts, key=lambda group: (counts[group], group), default='')


def _on_one_clock(file: _File, clocks: Sequence[_Clock]) -> list[Any]:
    """The events by the clock of the group's first rank, which drifts evenly between two looks."""
    if not clocks:
        return list(file.events)
    first, last = clocks[0], clocks[-1]
    drift = (last.offset - first.offset) / (last.at - first.at) if last.at > first.at else 0.

    def shifted(at: float) -> float:
        return at + first.offset + drift * (at - first.at)

    return [(shifted(begin), shifted(end), *rest) for begin, end, *rest in file.events]


def _order(event: Any) -> tuple[int, float, float]:
    """What is inside of something else comes after that."""
    begin, end, row, *_ = event
    return row, begin, -end
