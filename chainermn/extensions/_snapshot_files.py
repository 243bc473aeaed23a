"""Snapshot files: a copy of a state, written whole or not at all, verified, and chosen together."""
from __future__ import annotations

import contextlib
import copy
import os
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import chainer
import numpy as np

_PIECE = 1 << 20  # bytes; it is still in the cache when its checksum is known


class _Copying(chainer.serializers.DictionarySerializer):
    """A DictionarySerializer whose arrays nobody else has."""

    def __getitem__(self, key: str) -> _Copying:
        return _Copying(self.target, self.path + key.strip('/') + '/')

    def __call__(self, key: str, value: Any) -> Any:
        super().__call__(key, value)
        if not isinstance(value, chainer.backends.cuda.ndarray):  # which has come to the host
            name = self.path + key.lstrip('/')
            self.target[name] = copy_array(self.target[name])
        return value


def copy_state(target: Any) -> dict[str, Any]:
    """Copies all that an object serializes, to host arrays by name.  Waits for the GPU."""
    serializer = _Copying()
    serializer.save(target)
    return serializer.target


def copy_array(array: Any) -> Any:
    """Copies an array, and the objects in it."""
    return copy.deepcopy(array) if array.dtype.hasobject else array.copy(order='K')


def write(path: str, arrays: Mapping[str, Any], compress: bool = False) -> None:
    """Writes arrays to an npz file that is whole whenever it is there.

    They go to a temporary file beside it, which is renamed once it is on the disk, so a process
    that is killed meanwhile leaves the old file or none, and a temporary one that the next writing
    of the same file takes over.

    Raises:
        OSError: If the file cannot be written.  No file of that name is touched then.
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f'tmp-{name}.part')  # no file name of a snapshot ends so
    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    try:
        with open(temporary, 'wb') as file:
            # numpy.savez of NumPy 1.26 leaves its archive open if an array cannot be written.
            with zipfile.ZipFile(file, 'w', method) as archive:
                for key, value in arrays.items():
                    with archive.open(f'{key}.npy', 'w', force_zip64=True) as member:
                        _write_array(member, np.asanyarray(value))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise
    _sync_folder(folder)


def _write_array(file: Any, array: Any) -> None:
    """Writes what ``numpy.lib.format.write_array`` does, and lets other threads run meanwhile.

    That one holds the interpreter, and so the training, while it copies pieces of 16 MB.
    """
    if array.dtype.hasobject or array.dtype.names:
        np.lib.format.write_array(file, array)
        return
    header = np.lib.format.header_data_from_array_1_0(array)
    np.lib.format.write_array_header_1_0(file, header)
    data = np.ascontiguousarray(array.T if header['fortran_order'] else array)
    content = data.reshape(-1).view(np.uint8)
    for start in range(0, len(content), _PIECE):
        file.write(content[start:start + _PIECE])


def problem_of(path: str) -> str | None:
    """Reads a file through and says what is wrong with it, or ``None``.

    Every member of an npz file has a checksum (CRC-32).
    """
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError) \
            as error:
        return f'{type(error).__name__}: {error}'
    return None if broken is None else f'the checksum of {broken} is wrong'


def newest_common(comm: Any, files: Mapping[int, str] | None) -> int | None:
    """Finds the newest iteration of which all ranks have a whole file.

    Collective: every rank calls it.

    Args:
        comm: ChainerMN communicator.
        files: This rank's files by iteration; ``None`` if this rank needs none.

    Returns:
        The iteration, the same on every rank; ``None`` if there is none.

    Warns:
        RuntimeWarning: On rank 0, of each damaged file that was passed over.
    """
    everybody = [set(found) for found in comm.allgather_obj(None if files is None else list(files))
                 if found is not None]
    common = set.intersection(*everybody) if everybody else set()
    for iteration in sorted(common, reverse=True):
        problem = None
        if files is not None and (text := problem_of(files[iteration])) is not None:
            problem = f'{files[iteration]}: {text}'
        problems = [text for text in comm.allgather_obj(problem) if text is not None]
        if not problems:
            return iteration
        if comm.rank == 0:
            warnings.warn(f'the snapshot of iteration {iteration} is passed over:\n  '
                          + '\n  '.join(problems), RuntimeWarning, stacklevel=4)
    return None


def _sync_folder(folder: str) -> None:
    """Makes the renaming itself last."""
    descriptor = os.open(folder or os.curdir, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
