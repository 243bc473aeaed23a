"""Verifies a folder of checkpoints and snapshots: ``chainermn checkpoints``."""
from __future__ import annotations

import argparse
import os
import re
from typing import NamedTuple

from chainermn._failures.ranks import ranks_text
from chainermn.extensions._checkpointing import npz
from chainermn.extensions._checkpointing.manifest import Manifest, SaveName, is_manifest_name
from chainermn.extensions._checkpointing.rank_file import Tag, read_tag

#: Of checkpoints (run.0.500) and snapshots (snapshot_iter_500.0).
_OLDER_NAME = re.compile(r'.+\.\d+\.\d+|.+\d\.\d+', re.DOTALL)

class Row(NamedTuple):
    """One save, or a file that belongs to none."""

    name: str  # of the manifest; without one, of the first file
    iteration: int | None
    size: int | None  # number of ranks of the job that saved it
    problems: list[str]  # empty if a job can resume from the save
    note: str = ''

    def __str__(self) -> str:
        text = '\n    '.join(self.problems) or f'complete{self.note}'
        at = '' if self.iteration is None else f' iteration {self.iteration} of {self.size} ranks:'
        return f'{self.name}:{at} {text}'


def verify_folder(folder: str) -> list[Row]:
    """Read all files of a folder.  Needs no MPI, and runs no code from the files.

    Args:
        folder: Folder of checkpoints or snapshots.  Files on the disks of other nodes are missing.

    Returns:
        A row for each manifest, by iteration; then one for each save without a manifest, and for
        each file of an older version.

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
    others = _without_manifest(folder, [name for name in names if name not in listed], set(names))
    return sorted(saves, key=lambda row: (row.iteration or 0, row.name)) + others


def _without_manifest(folder: str, names: list[str], all_names: set[str]) -> list[Row]:
    """Return rows for the saves of these files, and for other files of ours."""
    rows: list[Row] = []
    saves: dict[str, dict[str, Tag]] = {}
    for name in names:
        if re.fullmatch(r'tmp-.*\.part', name):
            rows.append(Row(name, None, None, ['temporary file of a process that was killed']))
            continue
        path = os.path.join(folder, name)
        try:
            tag = read_tag(path)
        except Exception:
            continue  # another kind of file
        if tag is not None:
            saves.setdefault(tag.save, {})[name] = tag
        elif _OLDER_NAME.fullmatch(name):
            problem = npz.find_problem(path)
            rows.append(Row(name, None, None, [problem] if problem else [],
                            ', a file of an older version'))
    rows += [_row_of(folder, tags, all_names) for tags in saves.values()]
    return sorted(rows, key=lambda row: row.name)


def _row_of(folder: str, tags: dict[str, Tag], all_names: set[str]) -> Row:
    """Return the row of a save without a manifest."""
    problems = []
    for name, tag in tags.items():
        manifest = _manifest_name(name, tag.rank)
        if manifest is None:
            problems.append(f'{name}: is the file of rank {tag.rank}')
        elif manifest in all_names:
            problems.append(f'{name}: is not in {manifest}')
        elif problem := npz.find_problem(os.path.join(folder, name)):
            problems.append(f'{name}: {problem}')
    first = min(tags, key=lambda name: tags[name].rank)
    found = {tag.rank for tag in tags.values()}
    if missing := [rank for rank in tags[first].writers if rank not in found]:
        problems.append(f'the file{"s" * (len(missing) > 1)} of {ranks_text(missing)} '
                        f'{"are" if len(missing) > 1 else "is"} missing or damaged')
    return Row(first, tags[first].iteration, tags[first].size, problems,
               '; resuming writes its manifest')


def _manifest_name(name: str, rank: int) -> str | None:
    """Return the name of the manifest for the file of a rank; ``None`` for another rank's file."""
    found = re.fullmatch(rf'(.+)\.{rank}((?:\.\d+)?)', name, re.DOTALL)
    return found and SaveName(f'{found[1]}.', found[2]).manifest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = ('Verifies all checkpoints and snapshots in a folder. The exit status is '
                          '1 if one with a manifest is incomplete or damaged.')
    parser.add_argument('folder', metavar='FOLDER', help='folder of checkpoints or snapshots')


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Print a line for each save.

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
