"""Reads the records of runs."""
from __future__ import annotations

import bisect
import functools
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from chainermn._records.run_record import COLUMNS

_COPIED = ' copied '

#: What an update has, by column.
Row = Mapping[str, str]


class RecordedRank:
    """The record of a rank.

    Args:
        path: The file with the updates.

    Attributes:
        settings: The settings of the first start.
        lines: A line of each update; without those that a resume repeats, and the first ones, which
            copy the parameters of rank 0.

    Raises:
        ValueError: If the file is not a record.
    """

    def __init__(self, path: pathlib.Path) -> None:
        lines = path.read_text(encoding='utf-8').split('\n')[:-1]  # the last one may be incomplete
        if not lines or not lines[0].startswith('{"format": 1,'):
            raise ValueError(f'{path} is not a record of a run, or of another version')
        self.path = path
        self.settings: dict[str, Any] = json.loads(lines[0])
        self.lines: list[str] = []
        begin = 1
        for end in [n for n in range(1, len(lines)) if lines[n].startswith('{')] + [len(lines)]:
            self.lines += lines[begin:end]
            if end < len(lines):
                resumed = json.loads(lines[end])['first update']
                del self.lines[bisect.bisect_left(self.lines, resumed, key=_number):]
                begin = end + 1
        while self.lines and _COPIED in self.lines[0]:
            del self.lines[0]

    def __len__(self) -> int:
        return len(self.lines)

    def row(self, index: int) -> Row:
        """Return what an update has, by column."""
        row = dict(zip(COLUMNS, self.lines[index].split(' '), strict=True))
        row['copied'] = str(_COPIED.strip() == row['mean'])  # whether it is no step
        return row

    @functools.cached_property
    def details(self) -> Mapping[int, dict[str, Any]]:
        """The detailed updates by number; the last one of each number."""
        path = self.path.with_suffix('.details')
        lines = path.read_text(encoding='utf-8').split('\n')[:-1] if path.exists() else []
        return {each['update']: each for each in map(json.loads, lines)}


class RecordedRun:
    """The records of all ranks.

    Args:
        folder: The folder of the record.

    Attributes:
        ranks: The record of each rank, and of each optimizer if there are several, by name.

    Raises:
        ValueError: If there is no record in the folder.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        files = [path for path in folder.glob('*.txt')
                 if re.fullmatch(r'(.+\.)?rank\d+\.txt', path.name)] if folder.is_dir() else []
        if not files:
            raise ValueError(f'{folder} has no record of a run: no file rank0.txt')
        self.ranks = {path.stem: RecordedRank(path) for path in sorted(files, key=_key)}

    def replicas(self, name: str) -> dict[str, RecordedRank]:
        """Return the records of all ranks of the optimizer that a record is of."""
        optimizer = name.rpartition('rank')[0]
        return {other: record for other, record in self.ranks.items()
                if other.rpartition('rank')[0] == optimizer}

    @property
    def size(self) -> int:
        """The number of ranks of the job."""
        return int(next(iter(self.ranks.values())).settings['size'])


def _number(line: str) -> int:
    return int(line.partition(' ')[0])


def _key(path: pathlib.Path) -> tuple[str, int]:
    name, _, number = path.stem.rpartition('rank')
    return name, int(number)
