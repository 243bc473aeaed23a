"""Atomic files: a file is complete, or the one before is still there."""
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
    gets the permissions of any new file (the umask). A process that is killed before leaves the
    old file, if there was one, and a temporary file, which the next write of ``path`` replaces.

    Args:
        path: Path of the file; its folder must exist.
        sync: Whether the file is on the disk first, so that it survives a crash of the node.

    Yields:
        The temporary file.

    Raises:
        OSError: If the file cannot be written. The old file is unchanged then.

    Example:
        >>> from chainermn.optimizers import proxy
        >>> if comm.rank == 0:
        ...     with proxy.open_atomic('states.npz') as file:
        ...         np.savez(file, momentum=np.zeros(3))
    """
    folder, name = os.path.split(path)
    part = os.path.join(folder, temporary_name(name))
    remove(part)  # or open() would follow a link there
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
    """Return the umask of the process; os.umask() could only read it by changing it."""
    with contextlib.suppress(OSError), open('/proc/self/status', encoding='ascii',
                                            errors='replace') as file:
        for line in file:
            if line.startswith('Umask:'):
                return int(line.split()[1], 8)
    return 0o077


def _sync_folder(folder: str) -> None:
    """Bring the new name of the file to the disk."""
    descriptor = os.open(folder or os.curdir, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot
            raise
    finally:
        os.close(descriptor)
