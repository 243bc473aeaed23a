"""Verifies a folder of checkpoints and snapshots: ``python -m chainermn checkpoints``."""
from __future__ import annotations

import argparse
import os
import re
from typing import NamedTuple

from chainermn.extensions._checkpointing.manifest import Manifest, is_manifest_name
from chainermn.extensions._checkpointing.rank_file import read_tag


class Row(NamedTuple):
    """One save, or a file without a manifest."""

    name: str  # of the manifest or the file
    iteration: int | None
    size: int | None  # number of ranks of the job that saved it
    problems: list[str]  # empty if the save is complete

    def __str__(self) -> str:
        text = '\n    '.join(self.problems) or 'complete'
        at = '' if self.iteration is None else f' iteration {self.iteration} of {self.size} ranks:'
        return f'{self.name}:{at} {text}'


def verify_folder(folder: str) -> list[Row]:
    """Reads all files of a folder.  Needs no MPI, and runs no code from the files.

    Args:
        folder: Folder of checkpoints or snapshots.  Files on the disks of other nodes are missing.

    Returns:
        A row for each manifest, by iteration; then one for each other file that a checkpointer or a
        snapshot has written.

    Raises:
        OSError: If the folder cannot be read.
    """
    names = sorted(os.listdir(folder))
    saves: list[Row] = []
    listed: set[str] = set()
    for name in filter(is_manifest_name, names):
        try:
            manifest = Manifest.read(os.path.join(folder, name))
        except (OSError, ValueError) as error:
            saves.append(Row(name, None, None, [str(error)]))
            continue
        problems = [text for file in manifest.files if (text := file.find_problem(folder))]
        saves.append(Row(name, manifest.iteration, manifest.size, problems))
        listed.update(file.name for file in manifest.files)
    others = [row for name in names if name not in listed
              if (row := _without_manifest(folder, name)) is not None]
    return sorted(saves, key=lambda row: (row.iteration or 0, row.name)) + others


def _without_manifest(folder: str, name: str) -> Row | None:
    if re.fullmatch(r'tmp-.*\.part', name):
        return Row(name, None, None, ['temporary file of a process that was killed'])
    try:
        tag = read_tag(os.path.join(folder, name))
    except Exception:
        return None  # another kind of file
    return None if tag is None else Row(name, tag.iteration, tag.size, ['in no manifest'])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.description = ('Verifies all checkpoints and snapshots in a folder. The exit status is '
                          '1 if one with a manifest is incomplete or damaged.')
    parser.add_argument('folder', metavar='FOLDER', help='folder of checkpoints or snapshots')


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Prints a line for each save.

    Returns:
        1 if a manifest, or a file in a manifest, is damaged or missing; otherwise 0.
    """
    try:
        rows = verify_folder(options.folder)
    except OSError as error:
        parser.error(str(error))
    for row in rows:
        print(row)
    if not rows:
        print('No checkpoint or snapshot found.')
    return int(any(row.problems and is_manifest_name(row.name) for row in rows))
