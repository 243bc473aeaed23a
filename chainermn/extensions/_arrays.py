"""The arrays of an npz file that need not be trusted: reading them runs no code of the file."""
from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from chainermn.extensions._snapshot_files import TAG, Tag

_HEADER = (1 << 16) + 16  # bytes that the header of an array may take
_MAX_TAG = 1 << 26  # bytes; the tag of a million ranks has 8 MB
_MAX_RATIO = 1032  # deflate cannot compress better


class Arrays(Mapping[str, Any]):
    """The arrays by name, each read when it is asked for.

    Args:
        file: Its path, or an open file.
        name: What to call it in messages.
        allow_pickle: Whether arrays of Python objects are read, by ``pickle``, which runs whatever
            the file says.

    Raises:
        ValueError: If there is an array of objects other than ``None``, and that is not allowed.
    """

    def __init__(self, file: str | BinaryIO, name: str, allow_pickle: bool = False) -> None:
        self._allow_pickle = allow_pickle
        self._archive = zipfile.ZipFile(file)
        self._members = {member.removesuffix('.npy'): member
                         for member in self._archive.namelist()}
        try:
            objects = [] if allow_pickle else [key for key in self if self._is_object(key)]
            if objects:
                raise ValueError(
                    f'{name} was not loaded: {objects[0]!r} is an array of Python objects, and to '
                    'load it runs whatever code the file holds. If you trust everyone who could '
                    'write to the file, pass allow_pickle=True where the extension is made.')
        except BaseException:
            self._archive.close()
            raise

    def __getitem__(self, key: str) -> Any:
        if self._says_none(key):
            return np.asarray(None)
        with self._archive.open(self._members[key]) as file:
            return np.lib.format.read_array(file, allow_pickle=self._allow_pickle)

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __enter__(self) -> Arrays:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self._archive.close()

    def _is_object(self, key: str) -> bool:
        with self._archive.open(self._members[key]) as file:
            return _has_object(file) and not _is_none(file.read(1000))

    def _says_none(self, key: str) -> bool:
        with self._archive.open(self._members[key]) as file:
            return _has_object(file) and _is_none(file.read(1000))


def _has_object(file: Any) -> bool:
    return _header(file)[1].hasobject


def _header(file: Any) -> tuple[tuple[int, ...], Any]:
    """Reads the header of an array: its shape and dtype."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    elif version in ((2, 0), (3, 0)):  # which differ in the encoding of field names
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f'the format of an array is {version}')
    return shape, dtype


def _stripped(data: bytes) -> bytes:
    """A pickle without what depends on the version of NumPy: the module and the lengths."""
    return re.sub(rb'.numpy\._?core\.multiarray', b'', re.sub(rb'\x95.{8}', b'', data, flags=re.S),
                  flags=re.S)


#: How Chainer's serializers have saved ``None``; it is compared, never unpickled.
_NONE = frozenset(_stripped(pickle.dumps(np.asarray(None), protocol)) for protocol in (2, 3, 4, 5))


def _is_none(data: bytes) -> bool:
    return _stripped(data) in _NONE


def tag_of(path: str) -> Tag | None:
    """Reads what a file says of itself; ``None`` for a file of an older version.

    Raises:
        Exception: Of nearly any class, if it cannot be read or is damaged.
    """
    with zipfile.ZipFile(path) as archive:
        _check_directory(archive)
        if f'{TAG}.npy' not in archive.namelist():
            return None
        member = archive.getinfo(f'{TAG}.npy')
        _check_array(archive, member)
        if member.file_size > _MAX_TAG:
            raise ValueError(f'the tag has {member.file_size:,} bytes')
        with archive.open(member) as file:
            text = np.lib.format.read_array(file, allow_pickle=False).tobytes()
    fields = json.loads(text)
    if not isinstance(fields, dict) or set(fields) != set(Tag._fields):
        raise ValueError(f'the tag is not known: {text[:80]!r}')
    tag = Tag(**fields)
    numbers, texts = [tag.iteration, tag.size, tag.rank], [tag.save, tag.state, tag.buffers]
    if (not isinstance(tag.writers, list) or not tag.writers
            or not all(type(number) is int for number in numbers + tag.writers)
            or tag.writers != sorted(set(tag.writers))
            or not all(isinstance(one, str) for one in texts)):
        raise ValueError(f'the tag is not known: {text[:80]!r}')  # names of files are made of it
    return tag


def problem_of(path: str, is_known: bool = False) -> str | None:
    """Says what is wrong with a file, or ``None``.

    Nothing is allocated because the file claims to hold it.

    Args:
        path: Of the file.
        is_known: Whether its content was compared with a checksum.  Otherwise it is read through,
            as every member of an npz file has a checksum (CRC-32).
    """
    try:
        with zipfile.ZipFile(path) as archive:
            _check_directory(archive)
            broken = None if is_known else archive.testzip()
            if broken is not None:
                return f'the checksum of {broken} is wrong'
            for member in archive.infolist():
                _check_array(archive, member)
    except Exception as error:  # zipfile, zlib, struct, numpy and json raise nearly everything
        return f'{type(error).__name__}: {error}'
    return None


def _check_directory(archive: zipfile.ZipFile) -> None:
    """Compares what an archive claims to hold with the size of its file, and with its end."""
    assert archive.fp is not None
    members = archive.infolist()
    rest = archive.fp.seek(0, os.SEEK_END)
    for member in members:
        rest -= member.compress_size
        is_stored = member.compress_type == zipfile.ZIP_STORED
        most = member.compress_size * (1 if is_stored else _MAX_RATIO)
        if rest < 0 or member.file_size > most:
            raise ValueError(f'{member.filename} claims {member.file_size:,} bytes, more than the '
                             'file can hold')
    # A damaged length makes zipfile take members for a comment on the one before.
    archive.fp.seek(-22 - len(archive.comment), os.SEEK_END)
    count = int.from_bytes(archive.fp.read(12)[10:], 'little')
    if count not in (len(members), 0xffff):  # which stands for any large number
        raise ValueError(f'{count} arrays were written and {len(members)} are there')


def _check_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Compares what an array claims to hold with the size of its member."""
    with archive.open(member) as file:
        head = io.BytesIO(file.read(_HEADER))
    shape, dtype = _header(head)
    if dtype.hasobject:
        return  # a pickle, which is not read here
    claimed = math.prod(shape) * max(dtype.itemsize, 1)  # numpy makes 1 of 0
    if min(shape, default=0) < 0 or claimed != member.file_size - head.tell():
        raise ValueError(f'{member.filename} claims an array of shape {shape} and dtype {dtype}, '
                         f'and has {member.file_size - head.tell():,} bytes for it')
