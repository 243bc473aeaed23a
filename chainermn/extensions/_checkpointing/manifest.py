"""The manifest of a save: rank 0 writes it once the files of all ranks are on the disk.

A save counts if it has a manifest.  Its file is called ``commit-...``.
"""
from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

from chainermn._system.atomic_file import open_atomic, remove, temporary_name
from chainermn.extensions._checkpointing.rank_file import FileRecord

_PREFIX = 'commit-'
_FORMAT = 1
_MAX_SIZE = 1 << 28  # bytes of a manifest; a million ranks take less


@dataclass(frozen=True)
class Manifest:
    """The files of a save."""

    iteration: int
    size: int  # number of ranks of the job
    files: list[FileRecord]  # by rank

    @property
    def are_replicas(self) -> bool:
        """Whether all files hold the same model and optimizer."""
        return len({file.state for file in self.files}) == 1

    def write(self, path: str) -> None:
        """Write the manifest, atomically.

        Raises:
            OSError: If it cannot be written.
        """
        with open_atomic(path) as file:
            file.write(self._text().encode())

    @classmethod
    def read(cls, path: str) -> Manifest:
        """Read a manifest.

        Raises:
            ValueError: If a single character differs from what was written.
            OSError: If it cannot be read.
        """
        with open(path, 'rb') as file:
            size = os.fstat(file.fileno()).st_size
            if size > _MAX_SIZE:
                raise ValueError(f'is not a manifest: it has {size:,} bytes')
            content = file.read()
        try:
            body = json.loads(content)
            if body['format'] != _FORMAT:
                raise ValueError(f'its format is {body["format"]}, not {_FORMAT}')
            files = [FileRecord(**record) for record in body['files']]
            manifest = cls(body['iteration'], body['ranks'], files)
            _check_types(manifest, *files)
            if not files or any(os.path.basename(file.name) != file.name for file in files):
                raise ValueError('it names no files, or files in another folder')
            is_same = manifest._text().encode() == content
        except Exception as error:  # such as RecursionError: it may hold anything
            raise ValueError(f'is not a manifest: {type(error).__name__}: {error}') from None
        if not is_same:
            raise ValueError('was changed: its own SHA-256 is wrong')
        return manifest

    def _text(self) -> str:
        body = {
            'format': _FORMAT, 'iteration': self.iteration, 'ranks': self.size,
            'replicas': 'equal' if self.are_replicas else 'different',
            'files': [asdict(file) for file in self.files]}
        body['sha256'] = hashlib.sha256(json.dumps(body).encode()).hexdigest()
        return json.dumps(body, indent=1) + '\n'


def _check_types(*records: Manifest | FileRecord) -> None:
    for record in records:
        for field in fields(record):
            value, expected = getattr(record, field.name), str(field.type)
            if type(value).__name__ != expected.partition('[')[0]:
                raise ValueError(f'{field.name} is {str(value)[:80]!r}, not {expected}')


class SaveName(NamedTuple):
    """The file names of one save.

    >>> name = SaveName('run.', '.500')
    >>> name.file(0), name.file(1), name.manifest
    ('run.0.500', 'run.1.500', 'commit-run.500')
    """

    before: str  # the rank; ends with a dot
    after: str

    def file(self, rank: int) -> str:
        """Name of the file of a rank."""
        return f'{self.before}{rank}{self.after}'

    @property
    def manifest(self) -> str:
        """Name of the manifest."""
        # A prefix, as scripts find snapshots by the beginning of their names.
        return f'{_PREFIX}{self.before[:-1]}{self.after}'


@dataclass(frozen=True)
class SaveNames:
    """The file names of all saves of a run.

    Args:
        folder: Absolute path of the folder.
        of: Function that returns the names for an iteration.
    """

    folder: str
    of: Callable[[int | str], SaveName]

    def path(self, iteration: int | str, rank: int | None) -> str:
        """Path of the file of a rank; for ``None``, of the manifest."""
        name = self.of(iteration)
        return os.path.join(self.folder, name.manifest if rank is None else name.file(rank))

    def lock_path(self, rank: int) -> str:
        """Path of the file that a rank locks while it may write its files."""
        folder, name = os.path.split(self.path('N', rank))
        return os.path.join(folder, f'tmp-{name}.lock')

    def find(self, rank: int | None) -> dict[int, str]:
        """Return the paths of the files of a rank by iteration; for ``None``, of the manifests."""
        return self._find(self._pattern(rank))

    def find_temporary(self, rank: int | None) -> list[str]:
        """Return the paths of temporary files, as :meth:`find` those of complete ones."""
        return list(self._find(temporary_name(self._pattern(rank))).values())

    def _pattern(self, rank: int | None) -> str:
        name = self.of('\0')
        return name.manifest if rank is None else name.file(rank)

    def _find(self, pattern: str) -> dict[int, str]:
        before, after = pattern.split('\0')
        found = {}
        for name in os.listdir(self.folder) if os.path.isdir(self.folder) else []:
            number = name[len(before):len(name) - len(after)]
            if name.startswith(before) and name.endswith(after) and number.isdecimal():
                found[int(number)] = os.path.join(self.folder, name)
        return found


def is_manifest_name(name: str) -> bool:
    """Whether a file with this name is a manifest."""
    return name.startswith(_PREFIX)


def remove_manifest(folder: str, name: SaveName, writers: Collection[int]) -> None:
    """Remove a manifest, and files of ranks that this job does not have.

    Args:
        folder: Folder of the save.
        name: Name of the save.
        writers: The ranks that remove their files themselves.
    """
    path = os.path.join(folder, name.manifest)
    try:
        files = Manifest.read(path).files
    except (OSError, ValueError):
        files = []
    remove(path)
    for file in files:
        if file.rank not in writers and file.name == name.file(file.rank):
            remove(os.path.join(folder, file.name))
