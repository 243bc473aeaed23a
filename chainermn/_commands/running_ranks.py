"""The ranks that run on this host, and the file of each to which commands write requests."""
from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

_FILE = '/memfd:chainermn-dump'


def below(process: int) -> list[int]:
    """Return the ranks among a process and all of its descendants, parents before children."""
    children: dict[int, list[int]] = {}
    for each in processes():
        children.setdefault(parent(each), []).append(each)
    found = [process]
    for each in found:
        found += children.get(each, [])
    return [each for each in found if is_rank(each)]


def is_rank(process: int) -> bool:
    """Return whether a process of this user is a rank that has created a communicator."""
    return next(_files(process), None) is not None


def request(process: int, text: bytes) -> None:
    """Write a request for a rank.

    Raises:
        OSError: If it has ended.
    """
    for path in _files(process):
        with path.open('ab') as file:  # there may be another request
            file.write(text)
        return
    raise ProcessLookupError(f'process {process} has ended')


def processes() -> Iterator[int]:
    """Yield all processes of this host."""
    for path in pathlib.Path('/proc').glob('[0-9]*'):
        yield int(path.name)


def parent(process: int) -> int:
    """Return the parent of a process; 0 if it has none, or has ended."""
    with contextlib.suppress(OSError):
        text = pathlib.Path(f'/proc/{process}/stat').read_text()
        return int(text.rpartition(')')[2].split()[1])
    return 0


def arguments(process: int) -> list[str]:
    """Return the command line of a process."""
    with contextlib.suppress(OSError):
        return os.fsdecode(pathlib.Path(f'/proc/{process}/cmdline').read_bytes()).split('\0')[:-1]
    return []


def variable(process: int, name: str) -> str:
    """Return an environment variable of a process, '' if it is not set."""
    start = os.fsencode(name) + b'='
    with contextlib.suppress(OSError):
        for line in pathlib.Path(f'/proc/{process}/environ').read_bytes().split(b'\0'):
            if line.startswith(start):
                return os.fsdecode(line.removeprefix(start))
    return ''


def _files(process: int) -> Iterator[pathlib.Path]:
    """Yield the files of a process for requests; none if it belongs to another user."""
    with contextlib.suppress(OSError):
        for path in pathlib.Path(f'/proc/{process}/fd').iterdir():
            with contextlib.suppress(OSError):  # it has been closed
                if os.readlink(path).startswith(_FILE):
                    yield path
