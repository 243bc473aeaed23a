"""What is in a folder of checkpoints and snapshots: ``python -m chainermn checkpoints``."""
from __future__ import annotations

import argparse
import os
import re
from typing import NamedTuple

from chainermn.extensions._arrays import tag_of
from chainermn.extensions._commit import Commit


class Row(NamedTuple):
    """One save, or a file that belongs to none."""

    name: str  # of the commit file, or of a file that none names
    iteration: int | None
    size: int | None  # ranks of the job that saved it
    problems: list[str]  # none if it is whole

    def __str__(self) -> str:
        text = '\n    '.join(self.problems) or 'whole'
        at = '' if self.iteration is None else f' iteration {self.iteration} of {self.size} ranks:'
        return f'{self.name}:{at} {text}'


def describe(folder: str) -> list[Row]:
    """Reads all files of a folder through.  No MPI is needed, and nothing in the files is run.

    Args:
        folder: Of checkpoints or snapshots.  Files on the disks of other nodes are not seen.

    Returns:
        A row for each save that was committed, by iteration; then one for each other file that a
        checkpointer or a snapshot has written.

    Raises:
        OSError: If the folder cannot be read.
    """
    names = sorted(os.listdir(folder))
    saves: list[Row] = []
    committed: set[str] = set()
    for name in names:
        if _is_commit(name):
            try:
                commit = Commit.read(os.path.join(folder, name))
            except (OSError, ValueError) as error:
                saves.append(Row(name, None, None, [str(error)]))
                continue
            problems = [text for file in commit.files if (text := file.problem(folder))]
            saves.append(Row(name, commit.iteration, commit.size, problems))
            committed.update(file.name for file in commit.files)
    others = [row for name in names if name not in committed
              if (row := _uncommitted(folder, name)) is not None]
    return sorted(saves, key=lambda row: (row.iteration or 0, row.name)) + others


def _is_commit(name: str) -> bool:
    return name.startswith('commit-')


def _uncommitted(folder: str, name: str) -> Row | None:
    if re.fullmatch(r'tmp-.*\.part', name):
        return Row(name, None, None, ['left by a process that ended while it wrote'])
    try:
        tag = tag_of(os.path.join(folder, name))
    except Exception:
        return None  # something else
    if tag is None:
        return None
    return Row(name, tag.iteration, tag.size, ['no commit file names it'])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds those of the command."""
    parser.description = ('Reads all checkpoints and snapshots in a folder through, and says of '
                          'each whether it is whole. The exit status is 1 if one is not.')
    parser.add_argument('folder', metavar='FOLDER', help='of checkpoints or snapshots')


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Prints a line for each save; returns 1 if a commit file or a file that one names is bad."""
    try:
        rows = describe(options.folder)
    except OSError as error:
        parser.error(str(error))
    for row in rows:
        print(row)
    if not rows:
        print('no checkpoint or snapshot is here')
    return int(any(row.problems and _is_commit(row.name) for row in rows))
