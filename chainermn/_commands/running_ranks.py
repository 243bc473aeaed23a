"""Find the ranks that run on this host and write requests to their request files."""
from __future__ import annotations

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator

_FILE = re.compile(r'/memfd:chainermn-dump-(\S*)')


def below(process: int) -> list[int]:
    """Return the ranks among a process and its descendants, without descendants of ranks.

    A rank may start other jobs, with :func:`chainermn.launch`.
    """
    children: dict[int, list[int]] = {}
    for each in processes():
        children.setdefault(_parent(each), []).append(each)
    pending, ranks = [process], []
    for each in pending:
        if job(each) is not None:
            ranks.append(each)
        else:
            pending += children.get(each, [])
    return ranks


def job(process: int) -> str | None:
    """Return an identifier of a rank's job.

    Returns:
        ``None`` if the process belongs to another user or is not a rank that has created a
        communicator.
    """
    found = _file(process)
    return found[1] if found else None


def request(process: int, text: bytes) -> None:
    """Write a request for a rank.

    Raises:
        OSError: If the rank has exited.
    """
    found = _file(process)
    if found is None:
        raise ProcessLookupError(f'process {process} has exited')
    with found[0].open('ab') as file:  # append, because there may be another request
        file.write(text)


def processes() -> Iterator[int]:
    """Yield the IDs of all processes on this host."""
    for path in pathlib.Path('/proc').glob('[0-9]*'):
        yield int(path.name)


def _parent(process: int) -> int:
    with contextlib.suppress(OSError):  # it has exited
        text = pathlib.Path(f'/proc/{process}/stat').read_text()
        return int(text.rpartition(')')[2].split()[1])
    return 0


def _file(process: int) -> tuple[pathlib.Path, str] | None:
    """Return the request file of a process and the identifier in the name of the file."""
    folder = pathlib.Path(f'/proc/{process}')
    with contextlib.suppress(OSError):  # another user's process, or it has exited
        if folder.stat().st_uid != os.getuid():  # root can see the jobs of all users
            return None
        for path in (folder / 'fd').iterdir():
            with contextlib.suppress(OSError):  # the file has been closed
                if found := _FILE.match(os.readlink(path)):
                    return path, found[1]
    return None
