"""The arrays of an npz file that need not be trusted: reading them runs no code of the file."""
from __future__ import annotations

import json
import pickle
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from chainermn.extensions._snapshot_files import TAG, Tag

#: What reading a damaged file may raise.
DAMAGE = (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError,
          NotImplementedError)


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
    """Reads the header of an array; what it does not know, numpy refuses later."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)[2].hasobject
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(file)[2].hasobject
    return False


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
        OSError, zipfile.BadZipFile, ...: One of ``DAMAGE``, if it cannot be read.
    """
    with zipfile.ZipFile(path) as archive:
        if f'{TAG}.npy' not in archive.namelist():
            return None
        with archive.open(f'{TAG}.npy') as file:
            text = np.lib.format.read_array(file, allow_pickle=False).tobytes()
    fields = json.loads(text)
    if not isinstance(fields, dict) or set(fields) != set(Tag._fields):
        raise ValueError(f'the tag is not known: {text[:80]!r}')
    tag = Tag(**fields)
    numbers = [tag.iteration, tag.size, tag.rank, *tag.writers]
    if not tag.writers or not all(isinstance(number, int) for number in numbers):
        raise ValueError(f'the tag is not known: {text[:80]!r}')  # names of files are made of it
    return tag


def problem_of(path: str) -> str | None:
    """Reads a file through and says what is wrong with it, or ``None``.

    Every member of an npz file has a checksum (CRC-32).
    """
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except DAMAGE as error:
        return f'{type(error).__name__}: {error}'
    return None if broken is None else f'the checksum of {broken} is wrong'
