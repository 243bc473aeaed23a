"""Shards in the formats of NumPy: a sample is a row of an .npy file, or of all arrays of an .npz.

Small arrays are read at once, and checked with the CRC-32 of the .npz file.  Of large ones only the
rows of a batch are read, since memory that is mapped would count as that of the rank.
"""
from __future__ import annotations

import itertools
import math
import os
import re
import zipfile
import zlib
from collections.abc import Sequence
from io import BytesIO
from typing import BinaryIO

import numpy as np

from chainermn._types import Object

_LOCAL_HEADER = 30  # bytes, before the name of a member of a zip file
_MAX_HEADER = 1 << 16  # bytes of the header of an array


class NpyShard:
    """An .npy or .npz file.

    Args:
        path: The file.
        memory: Bytes that may be in memory; of a larger file, rows are read when they are needed.
            Compressed arrays are always read at once.

    Raises:
        ValueError, zipfile.BadZipFile: If the file is damaged, or has arrays of several lengths, or
            of Python objects.
    """

    def __init__(self, path: str, memory: int) -> None:
        self._file = open(path, 'rb', buffering=0)  # noqa: SIM115
        try:
            is_small = os.fstat(self._file.fileno()).st_size <= memory
            if path.endswith('.npz'):
                self._columns = _members(self._file, is_small)
            else:
                self._columns = {'': _Column(self._file, 0, None, is_small)}
            lengths = {name: len(column) for name, column in self._columns.items()}
            if len({*lengths.values()}) != 1:
                raise ValueError(f'the arrays have different lengths: {lengths}'
                                 if lengths else 'there are no arrays in it')
        except BaseException:
            self.close()
            raise
        names = [*self._columns]
        self._is_tuple = all(re.fullmatch(r'arr_\d+', name) for name in names)
        if self._is_tuple:
            self._columns = {name: self._columns[name] for name in sorted(
                names, key=lambda name: int(name[4:]))}
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def read(self, indexes: np.ndarray) -> Sequence[Object]:
        """Return samples: arrays, tuples of ``arr_0``, ..., or dicts of arrays with names."""
        rows = [column.rows(indexes) for column in self._columns.values()]
        if '' in self._columns:
            return [*rows[0]]
        samples = zip(*rows, strict=True)
        return [*samples] if self._is_tuple else [
            dict(zip(self._columns, sample, strict=True)) for sample in samples]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _members(file: BinaryIO, is_small: bool) -> dict[str, _Column]:
    """Return the arrays of an .npz file."""
    columns = {}
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix('.npy')
            if info.compress_type == zipfile.ZIP_STORED:
                local = os.pread(file.fileno(), _LOCAL_HEADER, info.header_offset)
                if len(local) < _LOCAL_HEADER or local[:4] != b'PK\3\4':
                    raise zipfile.BadZipFile(f'the array {name} is damaged')
                offset = info.header_offset + _LOCAL_HEADER + sum(
                    int.from_bytes(local[i:i + 2], 'little') for i in (26, 28))
                columns[name] = _Column(file, offset, info, is_small)
            else:
                with archive.open(info) as member:
                    array = np.lib.format.read_array(member, allow_pickle=False)
                    if member.read(1):  # also compares the CRC-32
                        raise zipfile.BadZipFile(f'the array {name} is damaged')
                columns[name] = _Column.of(array)
    return columns


class _Column:
    """An array in a file, or in memory.

    Args:
        file: The file.
        offset: Where the header of the array begins.
        info: The entry of the zip file, if it is in one.
        is_small: Whether to read it at once.
    """

    def __init__(self, file: BinaryIO, offset: int, info: zipfile.ZipInfo | None,
                 is_small: bool) -> None:
        self._file = file.fileno()
        available = os.fstat(self._file).st_size - offset
        if info is not None:
            available = min(available, info.file_size)
        header = _Header(os.pread(self._file, min(_MAX_HEADER, available), offset))
        self._offset, self._dtype, self._shape = offset + header.length, header.dtype, header.shape
        self._row = math.prod(self._shape[1:]) * self._dtype.itemsize
        expected = header.length + self._shape[0] * self._row
        if available < expected or (info is not None and info.file_size != expected):
            raise ValueError(f'the file is truncated or damaged: an array of {expected:,} bytes '
                             f'has {available:,}')
        self._array: np.ndarray | None = None
        if is_small or header.is_fortran:
            shape = self._shape[::-1] if header.is_fortran else self._shape
            data = np.empty(shape, self._dtype)
            self._read_into(data, self._offset)
            if info is not None and zlib.crc32(_bytes_of(data), header.crc) != info.CRC:
                raise zipfile.BadZipFile(f'the array {info.filename} is damaged (CRC-32)')
            self._array = data.T if header.is_fortran else data

    @classmethod
    def of(cls, array: np.ndarray) -> _Column:
        """Make a column of an array in memory."""
        if array.ndim == 0:
            raise ValueError('an array without dimensions has no samples')
        column = cls.__new__(cls)
        column._array, column._shape = array, array.shape
        return column

    def __len__(self) -> int:
        return self._shape[0]

    def rows(self, indexes: np.ndarray) -> np.ndarray:
        """Copy rows."""
        if self._array is not None:
            return self._array[indexes]
        rows = np.empty((len(indexes), *self._shape[1:]), self._dtype)
        # Consecutive rows are read at once.
        cuts = [0, *(np.flatnonzero(np.diff(indexes) != 1) + 1).tolist(), len(indexes)]
        for begin, end in itertools.pairwise(cuts):
            self._read_into(rows[begin:end], self._offset + int(indexes[begin]) * self._row)
        return rows

    def _read_into(self, array: np.ndarray, offset: int) -> None:
        rest = _bytes_of(array)
        while rest:
            n = os.preadv(self._file, [rest], offset)
            if n == 0:
                raise ValueError('the file has become shorter')
            rest, offset = rest[n:], offset + n


class _Header:
    """The beginning of an .npy file."""

    def __init__(self, data: bytes) -> None:
        # NumPy reads headers from files.
        file = BytesIO(data)
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f'version {version} of the format .npy is not supported')
        self.shape, self.is_fortran, self.dtype = read(file)
        self.is_fortran = self.is_fortran and len(self.shape) > 1
        self.length = file.tell()
        self.crc = zlib.crc32(data[:self.length])
        if self.dtype.hasobject:
            raise ValueError('arrays of Python objects are not read: that would run code')
        if not self.shape:
            raise ValueError('an array without dimensions has no samples')


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b'')
