"""The file names of a run's checkpoints, by number (usually the iteration) and by rank."""
from __future__ import annotations

import os
import re
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from chainermn._process.atomic_file import remove, temporary_name


@dataclass(frozen=True)
class SaveNames:
    """The file names of all checkpoints of a run.

    >>> names = SaveNames('/result', lambda number, rank: f'run.{rank}.{number}')
    >>> names.path(500, 0), names.path(500, 1)
    ('/result/run.0.500', '/result/run.1.500')

    Args:
        folder: Absolute path of the folder.
        file_name: Function that returns the file name for a number and a rank.
    """

    folder: str
    file_name: Callable[[int | str, int | str], str]

    def path(self, number: int | str, rank: int | str) -> str:
        """Return the path of the file of a rank."""
        return os.path.join(self.folder, self.file_name(number, rank))

    def lock_path(self, rank: int | str) -> str:
        """Return the path of the file that a rank locks while it may write its files."""
        folder, name = os.path.split(self.path('N', rank))
        return os.path.join(folder, f'tmp-{name}.lock')

    def find_locks(self) -> dict[int, str]:
        """Return the paths of the lock files of all ranks, including larger jobs, by rank."""
        return self._find(os.path.relpath(self.lock_path('\0'), self.folder))

    def find(self, rank: int) -> dict[int, str]:
        """Return the paths of the files of a rank, by number, in ascending order."""
        return self._find(self.file_name('\0', rank))

    def find_temporary(self, rank: int) -> list[str]:
        """Return the paths of the temporary files of a rank."""
        return list(self._find(temporary_name(self.file_name('\0', rank))).values())

    def check_no_folder(self, rank: int) -> None:
        """Check that no folder has the name of a rank's file, because a file cannot replace it.

        Raises:
            OSError: If there is such a folder.
        """
        if found := self._find(self.file_name('\0', rank), os.path.isdir):
            raise OSError(
                f'{min(found.values())} is a folder, but this job needs the name for a file. Move '
                'or rename the folder, or pass a different name or folder.')

    def remove(self, number: int, rank: int, writers: Collection[int]) -> None:
        """Remove the file of a rank; on rank 0, also files of ranks that this job does not have.

        Args:
            number: Number of the checkpoint.
            rank: Rank of this process.
            writers: The ranks that remove their files themselves.
        """
        remove(self.path(number, rank))
        for other, path in self._find(self.file_name(number, '\0')).items() if rank == 0 else ():
            if other not in writers:
                remove(path)

    def _find(self, pattern: str, is_wanted: Callable[[str], bool] = os.path.isfile
              ) -> dict[int, str]:
        names = os.listdir(self.folder) if os.path.isdir(self.folder) else []
        if '\0' not in pattern:  # all checkpoints have the same name
            path = os.path.join(self.folder, pattern)
            return {0: path} if pattern in names and is_wanted(path) else {}
        before, after = pattern.split('\0')
        found = {}
        for name in names:
            number = name[len(before):len(name) - len(after)]
            path = os.path.join(self.folder, name)
            if (name.startswith(before) and name.endswith(after) and number.isdecimal()
                    and is_wanted(path)):
                found[int(number)] = path
        return dict(sorted(found.items()))


class NamePattern(NamedTuple):
    """A file name of Chainer's snapshots with at most one number, which must be an integer.

    >>> pattern = NamePattern.of('snapshot_{.updater.iteration:06}.npz')
    >>> pattern.file_name(500, 1)
    'snapshot_000500.npz.1'
    >>> NamePattern.of('latest').file_name(500, 1)
    'latest.1'
    """

    prefix: str
    spec: str | None  # the format of the number; None if there is no number
    suffix: str

    @classmethod
    def of(cls, filename: str | Callable[..., str]) -> NamePattern | None:
        """Return the pattern of a file name; ``None`` if the name has no such pattern."""
        if callable(filename):
            return None
        try:
            parts = [*string.Formatter().parse(filename)]
        except ValueError:  # not a valid format string
            return None
        fields = [i for i, (_, field, *_) in enumerate(parts) if field is not None]
        literals = [literal for literal, *_ in parts]
        if not fields:
            return cls(''.join(literals), None, '')
        _, field, spec, conversion = parts[fields[0]]
        is_whole = re.fullmatch(r'(0\d+)?d?', spec or '') and not (field or '').endswith('_detail')
        if len(fields) > 1 or conversion or not is_whole:
            return None
        end = fields[0] + 1
        pattern = cls(''.join(literals[:end]), spec, ''.join(literals[end:]))
        return None if os.path.dirname(pattern.suffix) else pattern

    def file_name(self, number: int | str, rank: int | str) -> str:
        """Return the name of the file of a rank."""
        text = '' if self.spec is None else number if isinstance(number, str) else format(
            number, self.spec)
        return f'{self.prefix}{text}{self.suffix}.{rank}'
