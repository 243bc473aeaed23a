"""A file is on the disk whole, or what was there before is still there."""
from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """Opens a temporary file that takes the place of ``path`` once it is on the disk.

    It is beside ``path``, and for nobody else to read until it is whole; then it has the
    permissions that any new file would have (the umask).  A process that is killed meanwhile leaves
    the old file or none, and a temporary one that the next writing of the same file takes over.

    Raises:
        OSError: If the file cannot be written.  What was there is untouched then.
    """
    folder, name = os.path.split(path)
    part = os.path.join(folder, temporary(name))
    with contextlib.suppress(FileNotFoundError):
        os.remove(part)  # rather than to follow a link that somebody put there
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, 'wb') as file:
            yield file
            file.flush()
            with contextlib.suppress(OSError):  # a file system without permissions
                os.fchmod(descriptor, 0o666 & ~_umask())
            os.fsync(descriptor)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(part)
        raise
    _sync_folder(folder)


def temporary(name: str) -> str:
    """Name of the file that is written first; that of no snapshot begins or ends so."""
    return f'tmp-{name}.part'


def remove(path: str) -> None:
    """Removes a file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


def _umask() -> int:
    """The umask of the process, which the system calls do not tell without changing it."""
    with contextlib.suppress(OSError), open('/proc/self/status', encoding='ascii',
                                            errors='replace') as file:
        for line in file:
            if line.startswith('Umask:'):
                return int(line.split()[1], 8)
    return 0o077


def _sync_folder(folder: str) -> None:
    """Makes the renaming itself last."""
    descriptor = os.open(folder or os.curdir, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot
            raise
    finally:
        os.close(descriptor)
