"""Writes and reads npz files. Files are not trusted: reading runs no code and wastes no memory."""
from __future__ import annotations

import io
import math
import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import IO, BinaryIO

import numpy as np

_HEADER = (1 << 16) + 16  # maximum size of an array's header in bytes
_MAX_RATIO = 1032  # maximum compression ratio of deflate
_CHUNK = 1 << 20  # bytes; small enough to be still in the cache when its checksum is computed


def add_array(archive: zipfile.ZipFile, key: str, array: np.ndarray) -> None:
    """Add an array to an open npz file."""
    with archive.open(f'{key}.npy', 'w', force_zip64=True) as member:
        write_array(member, np.asanyarray(array))


def write_array(file: IO[bytes], array: np.ndarray) -> None:
    """Write the same bytes as ``numpy.lib.format.write_array``, but let other threads run.

    NumPy's function holds the GIL and blocks training while it copies 16 MB.
    """
    if array.dtype.hasobject or array.dtype.names:
        np.lib.format.write_array(file, array)
        return
    header = np.lib.format.header_data_from_array_1_0(array)
    np.lib.format.write_array_header_1_0(file, header)
    data = np.ascontiguousarray(array.T if header['fortran_order'] else array)
    content = data.reshape(-1).view(np.uint8).data
    for start in range(0, len(content), _CHUNK):
        file.write(content[start:start + _CHUNK])


class Arrays(Mapping[str, np.ndarray]):
    """The arrays of an npz file by name; each is read when it is accessed.

    Args:
        file: Path, or an open file.
        name: Name of the file in error messages.
        allow_pickle: Whether to read arrays of Python objects with ``pickle``, which runs any code
            that the file contains.

    Raises:
        ValueError: If the file has an array of Python objects other than ``None``, unless
            ``allow_pickle`` is true.
    """

    def __init__(self, file: str | BinaryIO, name: str, allow_pickle: bool = False) -> None:
        self._allow_pickle = allow_pickle
        self._archive = zipfile.ZipFile(file)
        self._members = {member.removesuffix('.npy'): member
                         for member in self._archive.namelist()}
        for key in () if allow_pickle else self:
            if self._pickle(key) not in {None, *_NONE}:
                raise ValueError(
                    f'{name} was not loaded: {key!r} is an array of Python objects, and loading it '
                    'would run code from the file. If you trust everyone who can write to the '
                    'file, pass allow_pickle=True when you create the extension.')

    def __getitem__(self, key: str) -> np.ndarray:
        if self._pickle(key) in _NONE:
            return np.asarray(None)
        with self._archive.open(self._members[key]) as file:
            return np.lib.format.read_array(file, allow_pickle=self._allow_pickle)

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __contains__(self, key: object) -> bool:
        return key in self._members  # without reading the array

    def __len__(self) -> int:
        return len(self._members)

    def __enter__(self) -> Arrays:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self._archive.close()

    def _pickle(self, key: str) -> bytes | None:
        """Return the beginning of the pickle of an object array; ``None`` for other arrays."""
        with self._archive.open(self._members[key]) as file:
            is_pickle = _read_header(file)[1].hasobject
            return _strip_version(file.read(1000)) if is_pickle else None


def find_problem(path: str, is_verified: bool = False) -> str | None:
    """Check a file, without allocating memory based on sizes that the file claims.

    Args:
        path: Path of the file.
        is_verified: Whether a checksum of the file has been verified. Otherwise, the CRC-32 of each
            array is checked.

    Returns:
        The problem with the file; ``None`` if there is none.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            check_directory(archive)
            broken = None if is_verified else archive.testzip()
            if broken is not None:
                return f'the checksum of {broken} is wrong'
            for member in archive.infolist():
                check_member(archive, member)
    except Exception as error:  # zipfile, zlib, struct, numpy and json raise almost any type
        return f'{type(error).__name__}: {error}'
    return None


def check_directory(archive: zipfile.ZipFile) -> None:
    """Raise ValueError if an archive claims to contain more than the size of its file allows."""
    assert archive.fp is not None
    members = archive.infolist()
    rest = archive.fp.seek(0, os.SEEK_END)
    for member in members:
        rest -= member.compress_size
        is_stored = member.compress_type == zipfile.ZIP_STORED
        most = member.compress_size * (1 if is_stored else _MAX_RATIO)
        if rest < 0 or member.file_size > most:
            raise ValueError(f'{member.filename} claims to have {member.file_size:,} bytes, more '
                             'than the file can hold')
    # If the length is damaged, zipfile reads some members as a comment on the previous one.
    archive.fp.seek(-22 - len(archive.comment), os.SEEK_END)
    count = int.from_bytes(archive.fp.read(12)[10:], 'little')
    if count not in (len(members), 0xffff):  # 0xffff stands for any larger number
        raise ValueError(f'the file should have {count} arrays, but has {len(members)}')


def check_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Raise ValueError if an array's header claims a different size than the array has."""
    with archive.open(member) as file:
        head = io.BytesIO(file.read(_HEADER))
    shape, dtype = _read_header(head)
    if dtype.hasobject:
        return  # a pickle, which is not read here
    claimed = math.prod(shape) * max(dtype.itemsize, 1)  # NumPy changes an item size of 0 to 1
    if min(shape, default=0) < 0 or claimed != member.file_size - head.tell():
        raise ValueError(f'{member.filename} claims an array of shape {shape} and dtype {dtype}, '
                         f'but contains {member.file_size - head.tell():,} bytes of data')


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Read the shape and dtype in the header of an array."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    elif version in ((2, 0), (3, 0)):  # these only differ in the encoding of field names
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f'unknown array format {version}')
    return shape, dtype


def _strip_version(data: bytes) -> bytes:
    """Remove the parts of a pickle that depend on NumPy's version: the module and lengths."""
    return re.sub(rb'.numpy\._?core\.multiarray', b'', re.sub(rb'\x95.{8}', b'', data, flags=re.S),
                  flags=re.S)


#: The pickles of ``None`` that Chainer's serializers save. They are compared, never unpickled.
_NONE = frozenset(_strip_version(pickle.dumps(np.asarray(None), protocol))
                  for protocol in (2, 3, 4, 5))
