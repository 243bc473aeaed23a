"""Verifies a folder of checkpoints and snapshots: ``chainermn checkpoints``."""
from __future__ import annotations

import argparse
import os
import re
from typing import NamedTuple

from chainermn.extensions._checkpointing.rank_file import Tag, find_problem, read_tag

#: Checkpoints (run.0.500) and snapshots (snapshot_iter_500.0).
_FILE_NAME = re.compile(r'.+\.\d+\.\d+|.+\d\.\d+', re.DOTALL)


class Row(NamedTuple):
    """One checkpoint, or a file that belongs to no checkpoint."""

    name: str  # name of the first file
    iteration: int | None
    size: int | None  # number of ranks of the job that saved it
    problems: list[str]  # empty if a job can resume from the checkpoint
    note: str = ''

    def __str__(self) -> str:
        text = '\n    '.join(self.problems) or f'complete{self.note}'
        at = '' if self.iteration is None else f' iteration {self.iteration} of {self.size} ranks:'
        return f'{self.name}:{at} {text}'


def verify_folder(folder: str) -> list[Row]:
    """Verify all files in a folder. Needs no MPI and runs no code from the files.

    Args:
        folder: Folder of checkpoints or snapshots. Files on the disks of other nodes count as
            missing.

    Returns:
        A row for each checkpoint, by iteration; then a row for each damaged file that belongs to no
        checkpoint, for each file of ChainerMN 7, and for each temporary file.

    Raises:
        OSError: If the folder cannot be read.
    """
    checkpoints: list[Row] = []
    others: list[Row] = []
    listed: set[str] = set()
    tags: dict[str, Tag | None] = {}
    for name in sorted(os.listdir(folder)):
        if re.fullmatch(r'tmp-.*\.part', name):
            others.append(Row(name, None, None, ['temporary file of a process that was killed']))
        else:
            tags[name] = _read_tag(os.path.join(folder, name))
    for name, tag in tags.items():
        if name not in listed and tag is not None:
            files = _names_of_files(name, tag)
            listed.update(files.values())
            problems = [find_problem(os.path.join(folder, file), rank, tag)
                        for rank, file in files.items()]
            if not files:
                problems = [f'{os.path.join(folder, name)}: the file was renamed']
            checkpoints.append(Row(next(iter(files.values()), name), tag.iteration, tag.size,
                                   [problem for problem in problems if problem is not None]))
    for name in tags.keys() - listed:
        path = os.path.join(folder, name)
        if tags[name] is None and _FILE_NAME.fullmatch(name) and os.path.isfile(path):
            problem = find_problem(path, 0, None)
            others.append(Row(name, None, None, [] if problem is None else [problem],
                              ', a file of ChainerMN 7'))
    return (sorted(checkpoints, key=lambda row: (row.iteration or 0, row.name))
            + sorted(others, key=lambda row: row.name))


def _read_tag(path: str) -> Tag | None:
    try:
        return read_tag(path)
    except Exception:  # the file is damaged or has a different format
        return None


def _names_of_files(name: str, tag: Tag) -> dict[int, str]:
    """Return the names of all files of a checkpoint by rank; ``{}`` if this file was renamed."""
    found = re.fullmatch(rf'(.+\.){tag.rank}((?:\.\d+)?)', name, re.DOTALL)
    return {rank: f'{found[1]}{rank}{found[2]}' for rank in tag.writers} if found else {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = ('Verifies all checkpoints and snapshots in a folder. The exit status is '
                          '1 if one is incomplete or damaged.')
    parser.add_argument('folder', metavar='FOLDER', help='folder of checkpoints or snapshots')


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Print a line for each checkpoint.

    Returns:
        1 if a checkpoint is incomplete or damaged; otherwise 0.
    """
    try:
        rows = verify_folder(options.folder)
    except OSError as error:
        parser.error(f'cannot read the folder {options.folder}: {error.strerror}')
    for row in rows:
        print(row)
    if not rows:
        print('No checkpoint or snapshot found.')
    return int(any(row.problems for row in rows))
