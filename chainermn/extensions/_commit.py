"""The commit file: rank 0 writes it when the files of all ranks are on the disk, and not before."""
from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from chainermn.extensions import _durable
from chainermn.extensions._arrays import problem_of
from chainermn.extensions._snapshot_files import Written

_FORMAT = 1
_MAX_SIZE = 1 << 28  # bytes of a commit file; a million ranks take less


@dataclass(frozen=True)
class File:
    """One file of a save."""

    rank: int  # that wrote it
    name: str  # without the folder
    bytes: int
    sha256: str
    state: str  # see Tag
    buffers: str

    @staticmethod
    def of(path: str, written: Written) -> File:
        """Describes a file that has a tag."""
        assert written.tag is not None
        return File(written.tag.rank, os.path.basename(path), written.bytes, written.sha256,
                    written.tag.state, written.tag.buffers)

    def problem(self, folder: str) -> str | None:
        """Reads the file through and says what is wrong with it, or ``None``."""
        path = os.path.join(folder, self.name)
        try:
            with open(path, 'rb') as file:
                size = os.fstat(file.fileno()).st_size
            found = digest(path)[1] if size == self.bytes else ''
        except FileNotFoundError:
            return f'{path}: is missing'
        except (OSError, ValueError) as error:  # ValueError: it cannot be the name of a file
            return f'{path!a}: {type(error).__name__}: {error}'
        if size != self.bytes:
            return f'{path}: has {size:,} bytes, not the {self.bytes:,} that were committed'
        if found != self.sha256:
            return f'{path}: the SHA-256 is wrong'
        problem = problem_of(path, is_known=True)
        return None if problem is None else f'{path}: {problem}'


def digest(path: str) -> tuple[int, str]:
    """Reads a file through.

    Returns:
        Bytes and SHA-256.
    """
    sha256, size = hashlib.sha256(), 0
    piece = memoryview(bytearray(1 << 20))
    with open(path, 'rb', buffering=0) as file:
        while count := file.readinto(piece):
            sha256.update(piece[:count])
            size += count
    return size, sha256.hexdigest()


@dataclass(frozen=True)
class Commit:
    """What a commit file says."""

    iteration: int
    size: int  # ranks of the job
    files: list[File]  # by rank

    @property
    def are_replicas(self) -> bool:
        """Whether all files hold the same model and optimizer."""
        return len({file.state for file in self.files}) == 1

    def write(self, path: str) -> None:
        """Writes it, whole or not at all.

        Raises:
            OSError: If it cannot be written.
        """
        with _durable.replacing(path) as file:
            file.write(self._text().encode())

    @staticmethod
    def read(path: str) -> Commit:
        """Reads a commit file.

        Raises:
            ValueError: If it is not what was written, down to the last character.
            OSError: If it cannot be read.
        """
        with open(path, 'rb') as file:
            size = os.fstat(file.fileno()).st_size
            if size > _MAX_SIZE:
                raise ValueError(f'is no commit file: it has {size:,} bytes')
            content = file.read()
        try:
            said = json.loads(content)
            if said['format'] != _FORMAT:
                raise ValueError(f'its format is {said["format"]}, and {_FORMAT} is known')
            files = [File(**one) for one in said['files']]
            commit = Commit(said['iteration'], said['ranks'], files)
            _check_types(commit)
            if not files or any(os.path.basename(file.name) != file.name for file in files):
                raise ValueError('it names no files, or some of another folder')
            is_same = commit._text().encode() == content
        except Exception as error:  # such as RecursionError: it may hold anything
            raise ValueError(f'is no commit file: {type(error).__name__}: {error}') from None
        if not is_same:
            raise ValueError('was changed: its own SHA-256 is wrong')
        return commit

    def _text(self) -> str:
        body: dict[str, Any] = {
            'format': _FORMAT, 'iteration': self.iteration, 'ranks': self.size,
            'replicas': 'equal' if self.are_replicas else 'different',
            'files': [asdict(file) for file in self.files]}
        body['sha256'] = hashlib.sha256(json.dumps(body).encode()).hexdigest()
        return json.dumps(body, indent=1) + '\n'


def _check_types(commit: Commit) -> None:
    ones: list[Any] = [commit, *commit.files]
    for one in ones:
        for field in fields(one):
            value = getattr(one, field.name)
            if type(value).__name__ != field.type.partition('[')[0]:
                raise ValueError(f'{field.name} is {str(value)[:80]!r}, not {field.type}')


@dataclass(frozen=True)
class Names:
    """How the files of a run are called.

    Args:
        folder: Where they are.
        make: Gives the name from the iteration and from the rank that writes; from ``None`` instead
            of the rank, that of the commit file.
    """

    folder: str
    make: Callable[[Any, Any], str]

    def path(self, iteration: Any, rank: int | None) -> str:
        # Absolute, for the thread: the process may go to another folder.
        return os.path.abspath(os.path.join(self.folder, self.make(iteration, rank)))

    def lock(self, rank: int) -> str:
        """Path of the file that a rank locks as long as it may write its files."""
        folder, name = os.path.split(self.path('N', rank))
        return os.path.join(folder, f'tmp-{name}.lock')

    @property
    def temporary(self) -> Names:
        """Names of the files that these are written to first."""
        return Names(self.folder, lambda iteration, rank: _durable.temporary(
            self.make(iteration, rank)))

    def find(self, rank: int | None) -> dict[int, str]:
        """Paths of the files of a rank, or of the commit files, by iteration."""
        before, after = self.make('\0', rank).split('\0')
        found = {}
        for name in os.listdir(self.folder) if os.path.isdir(self.folder) else []:
            number = name[len(before):len(name) - len(after)]
            if name.startswith(before) and name.endswith(after) and number.isdecimal():
                found[int(number)] = self.path(number, rank)
        return found
