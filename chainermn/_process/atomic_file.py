"""Atomic files: a path always has either the complete new file or the previous one."""
from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def open_atomic(path: str, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` once it is complete.

    The temporary file is in the same folder, and only its owner can read it. The complete file
    gets the permissions of any new file (the umask). If the process is killed before the file is
    complete, the old file remains, if there was one, and so does the temporary file, which the next
    write to ``path`` replaces.

    Args:
        path: The path of the file; its folder must exist.
        sync: Whether to flush the file to disk before it replaces the old one, so that it survives
            a crash of the node.

    Yields:
        The temporary file.

    Raises:
        OSError: If the file cannot be written. The old file is then unchanged.

    Example:
        >>> from chainermn.optimizers import proxy
        >>> if comm.rank == 0:
        ...     with proxy.open_atomic('states.npz') as file:
        ...         np.savez(file, momentum=np.zeros(3))
    """
    folder, name = os.path.split(path)
    part = os.path.join(folder, temporary_name(name))
    remove(part)  # O_EXCL fails if the path exists, even as a link
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, 'wb') as file:
            yield file
            file.flush()
            with contextlib.suppress(OSError):  # a file system without permissions
                os.fchmod(descriptor, 0o666 & ~_umask())
            if sync:
                os.fsync(descriptor)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(part)
        raise
    if sync:
        _sync_folder(folder)


def temporary_name(name: str) -> str:
    """Return the name of the temporary file. No checkpoint or snapshot has such a name."""
    return f'tmp-{name}.part'


def remove(path: str) -> None:
    """Remove a file, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


def _umask() -> int:
    """Return the umask of the process, which os.umask() could only read by changing it."""
    with contextlib.suppress(OSError), open('/proc/self/status', encoding='ascii',
                                            errors='replace') as file:
        for line in file:
            if line.startswith('Umask:'):
                return int(line.split()[1], 8)
    return 0o077


def _sync_folder(folder: str) -> None:
    """Flush the new name of the file to disk."""
    descriptor = os.open(folder or os.curdir, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not supported by some file systems
            raise
    finally:
        os.close(descriptor)
