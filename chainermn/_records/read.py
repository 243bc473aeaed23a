"""Reads the records of runs."""
from __future__ import annotations

import bisect
import functools
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from chainermn._records.run_record import COLUMNS

_COPIED = ' copied '
_UPDATE = '{"update": '  # the beginning of a line of details

#: The values of an update, by column.
Row = Mapping[str, str]


class RecordedRank:
    """The record of a rank.

    Args:
        path: The file with the updates.

    Attributes:
        settings: The settings of the first start.
        size: The largest number of ranks that the run has had.
        lines: One line per update, without updates that a resume repeats, and without the first
            updates, which copy the parameters of rank 0.

    Raises:
        ValueError: If the file is not a record.
    """

    def __init__(self, path: pathlib.Path) -> None:
        lines = _complete_lines(path)
        if not lines or not lines[0].startswith('{"format": 1,'):
            raise ValueError(f'{path} is not a run record, or was written by a different version '
                             'of ChainerMN')
        self.path = path
        self.settings: dict[str, Any] = json.loads(lines[0])
        self.size = max(json.loads(line)['size'] for line in lines if line.startswith('{'))
        self.lines: list[str] = []
        columns = self.settings['columns']
        begin = 1
        for end in [n for n in range(1, len(lines)) if lines[n].startswith('{')] + [len(lines)]:
            self.lines += lines[begin:end]
            if end < len(lines):
                if self.lines and self.lines[-1].count(' ') != len(columns) - 1:
                    del self.lines[-1]  # the run was killed while writing it
                resumed = json.loads(lines[end])['first update']
                del self.lines[bisect.bisect_left(self.lines, resumed, key=_number):]
                begin = end + 1
        if columns != [*COLUMNS]:  # a record of a different version
            rows = (dict(zip(columns, line.split(' '), strict=True)) for line in self.lines)
            self.lines = [' '.join(row.get(name, '-') for name in COLUMNS) for row in rows]
        while self.lines and _COPIED in self.lines[0]:
            del self.lines[0]

    def __len__(self) -> int:
        return len(self.lines)

    def row(self, index: int) -> Row:
        """Return the values of an update, by column."""
        row = dict(zip(COLUMNS, self.lines[index].split(' '), strict=True))
        row['copied'] = str(_COPIED.strip() == row['mean'])  # instead of a step
        return row

    def call(self, index: int) -> int:
        """Return the number of an update over all optimizers; if unknown, over this one only."""
        call = self.lines[index].rpartition(' ')[2]
        return int(call) if call.isdigit() else index

    def position(self, call: int) -> int:
        """Return the position of the first update that is not earlier than a call."""
        return bisect.bisect_left(range(len(self)), call, key=self.call)

    def hyperparameters(self, index: int) -> dict[str, Any]:
        """Return the hyperparameters of an update, by name; empty if they are unknown."""
        column = COLUMNS.index('hyperparameters')
        for line in reversed(self.lines[:index + 1]):
            text = line.split(' ')[column]
            if text.startswith('{'):
                return dict(json.loads(text))
        return {}

    def columns(self, names: Iterable[str], begin: int = 0, end: int | None = None
                ) -> list[list[str]]:
        """Return columns of the updates between two indices."""
        fields = ' '.join(self.lines[begin:end]).split(' ')
        return [fields[COLUMNS.index(name)::len(COLUMNS)] for name in names]

    @functools.cached_property
    def _details(self) -> dict[int, str]:
        path = self.path.with_suffix('.details')
        lines = _complete_lines(path) if path.exists() else []
        return {int(line[len(_UPDATE):line.index(',')]): line for line in lines
                if line.startswith(_UPDATE)}

    @property
    def detailed(self) -> list[int]:
        """The numbers of the updates with digests of each parameter and function."""
        return [*self._details]

    def details(self, number: int) -> dict[str, Any]:
        """Return the digests of an update, or an empty dict.

        If an update was repeated after a resume, these are the last digests.
        """
        found = json.loads(self._details.get(number, '{}'))
        if found:
            found.setdefault('hyperparameters', self.hyperparameters(
                bisect.bisect_left(self.lines, number, key=_number)))
        return found


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
            raise ValueError(
                f'{folder} has no record of a run: no file rank0.txt. Pass the folder in '
                'CHAINERMN_RECORD, or the folder "record" in the output folder of the Trainer.'
                if folder.is_dir() else
                f'{folder} is a file. Pass its folder: {folder.parent}' if folder.is_file() else
                f'no such folder: {folder}')
        records = {path.stem: RecordedRank(path) for path in sorted(files, key=_key)}
        sizes = {name.rpartition('rank')[0]: record.size
                 for name, record in reversed(records.items())}  # the first rank wins
        #: The records, without those of ranks of an earlier run.
        self.ranks = {name: record for name, record in records.items()
                      if record.settings['rank'] < sizes[name.rpartition('rank')[0]]}
        lengths: dict[str, list[int]] = {}
        for name, record in self.ranks.items():
            lengths.setdefault(name.rpartition('rank')[0], []).append(len(record))
        if any(min(each) for each in lengths.values()):
            # A run may end before all ranks have updated with its last optimizer.
            self.ranks = {name: record for name, record in self.ranks.items()
                          if min(lengths[name.rpartition('rank')[0]])}
        #: The names of missing files.
        self.missing = [f'{name}rank{rank}.txt' for name, size in sizes.items()
                        for rank in range(size) if f'{name}rank{rank}' not in records]

    def replicas(self, name: str) -> dict[str, RecordedRank]:
        """Return the records of all ranks for the optimizer of a given record."""
        optimizer = name.rpartition('rank')[0]
        return {other: record for other, record in self.ranks.items()
                if other.rpartition('rank')[0] == optimizer}

    def mean_loss(self, name: str, index: int) -> str:
        """Return the mean loss of all ranks in an update of an optimizer; ``-`` if unknown."""
        losses = [record.row(index)['loss'] for record in self.replicas(name).values()
                  if index < len(record)]
        is_known = '-' not in losses and len(losses) == self.size
        return str(sum(map(float, losses)) / len(losses)) if is_known else '-'

    @property
    def size(self) -> int:
        """The number of ranks of the job."""
        return int(next(iter(self.ranks.values())).settings['size'])


def _complete_lines(path: pathlib.Path) -> list[str]:
    return path.read_text(encoding='utf-8').split('\n')[:-1]  # without an incomplete last line


def _number(line: str) -> int:
    return int(line.partition(' ')[0])


def _key(path: pathlib.Path) -> tuple[str, int]:
    name, _, number = path.stem.rpartition('rank')
    return name, int(number)
