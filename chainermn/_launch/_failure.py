"""Why a rank failed, and the error that says so in the caller."""
from __future__ import annotations

import glob
import json
from typing import Any, NamedTuple

from chainermn._launch import _parcel


class RemoteTraceback(Exception):  # noqa: N818  it is the cause of an error, and no error
    """Where a rank failed; shown above the error, as its cause."""


class Failure(NamedTuple):
    """What a rank, or the process that watches over it, wrote down."""

    when: float  # seconds, on a clock that all ranks share
    rank: int
    host: str
    process: int
    what: str
    text: str  # its traceback, if it has one

    def error(self, folder: str, n: int, others: list[Failure]) -> Exception:
        """Returns what to raise: the rank's own error, where that could be pickled."""
        where = f'rank {self.rank} of {n} (host {self.host}, process {self.process})'
        also = ''.join(f'\nrank {other.rank} failed as well: {other.what}' for other in others)
        if not self.text:
            return RuntimeError(f'{where} {self.what}{also}')
        error = self._own_error(folder)
        if error is None:
            error = RuntimeError(f'{self.what} [{where}]')
        elif len(error.args) == 1 and str(error) == error.args[0]:
            error.args = (f'{error} [{where}]',)
        error.__cause__ = RemoteTraceback(f'{where} failed:\n\n{self.text}{also}')
        return error

    def _own_error(self, folder: str) -> Exception | None:
        try:
            error = _parcel.load(f'{folder}/error-{self.rank}')
        except Exception:  # unpickling runs code of the error
            return None
        return error if isinstance(error, Exception) else None


def failures_in(folder: str) -> list[Failure]:
    """Returns the failures so far, the first one first."""
    found = []
    for path in glob.glob(f'{glob.escape(folder)}/failed-*[0-9]'):
        with open(path) as file:
            said: dict[str, Any] = json.load(file)
        found.append(Failure(rank=int(path.rpartition('-')[2]), **said))
    return sorted(found)
