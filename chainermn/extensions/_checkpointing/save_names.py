"""The file names of the saves of a run: by number, usually the iteration, and by rank."""
from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

from chainermn._process.atomic_file import remove, temporary_name


@dataclass(frozen=True)
class SaveNames:
    """The file names of all saves of a run.

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
        """Path of the file of a rank."""
        return os.path.join(self.folder, self.file_name(number, rank))

    def lock_path(self, rank: int | str) -> str:
        """Path of the file that a rank locks while it may write its files."""
        folder, name = os.path.split(self.path('N', rank))
        return os.path.join(folder, f'tmp-{name}.lock')

    def find_locks(self) -> dict[int, str]:
        """Return the paths of the lock files of all ranks, also of larger jobs, by rank."""
        return self._find(os.path.relpath(self.lock_path('\0'), self.folder))

    def find(self, rank: int) -> dict[int, str]:
        """Return the paths of the files of a rank, by number, in ascending order."""
        return self._find(self.file_name('\0', rank))

    def find_temporary(self, rank: int) -> list[str]:
        """Return the paths of the temporary files of a rank."""
        return list(self._find(temporary_name(self.file_name('\0', rank))).values())

    def check_no_folder(self, rank: int) -> None:
        """Check that no folder has the name of a file of a rank, which could not replace it.

        Raises:
            OSError: If there is one.
        """
        if found := self._find(self.file_name('\0', rank), os.path.isdir):
            raise OSError(
                f'{min(found.values())} is a folder, but this job needs the name for a file. Move '
                'or rename the folder, or pass another name or folder.')

    def remove(self, number: int, rank: int, writers: Collection[int]) -> None:
        """Remove the file of a rank; on rank 0 also those of ranks that this job does not have.

        Args:
            number: Number of the save.
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
        if '\0' not in pattern:  # all saves have one name
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
