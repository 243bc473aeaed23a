"""The failure of a rank, and the error that is raised in the caller."""
from __future__ import annotations

import glob
import json
from typing import Any, NamedTuple

from chainermn._commands.launch import serialization
from chainermn._operations.exceptions import ChainerMNError


class RemoteTraceback(ChainerMNError):  # noqa: N818  only the cause of an error
    """The traceback of the rank that failed, shown as the cause of the error."""


class Failure(NamedTuple):
    """A failure that a rank or its parent process reported."""

    when: float  # seconds, time.monotonic()
    rank: int
    host: str
    process: int
    reason: str
    traceback: str  # empty if there is no traceback

    def error(self, folder: str, n: int, others: list[Failure]) -> Exception:
        """Return the error to raise: the rank's own error if it can be unpickled.

        Args:
            folder: The folder of the job.
            n: The number of ranks.
            others: The other failures, for the message.
        """
        where = f'rank {self.rank} of {n} (host {self.host}, process {self.process})'
        also = ''.join(f'\nrank {other.rank} also failed: {other.reason}' for other in others)
        if not self.traceback:
            return RuntimeError(f'{where} {self.reason}{also}')
        error = self._load_error(folder)
        if error is None:
            error = RuntimeError(f'{self.reason} [{where}]')
        elif len(error.args) == 1 and str(error) == error.args[0]:
            error.args = (f'{error} [{where}]',)
        error.__cause__ = RemoteTraceback(f'{where} failed:\n\n{self.traceback}{also}')
        return error

    def _load_error(self, folder: str) -> Exception | None:
        try:
            error = serialization.load(f'{folder}/error-{self.rank}')
        except Exception:  # unpickling can run arbitrary code
            return None
        return error if isinstance(error, Exception) else None


def read_failures(folder: str) -> list[Failure]:
    """Return the failures so far, in chronological order.

    Args:
        folder: The folder of the job.
    """
    failures = []
    for path in glob.glob(f'{glob.escape(folder)}/failed-*[0-9]'):
        with open(path) as file:
            content: dict[str, Any] = json.load(file)
        failures.append(Failure(rank=int(path.rpartition('-')[2]), **content))
    return sorted(failures)
