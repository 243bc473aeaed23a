"""Shards in NumPy formats: a sample is a row of an .npy file, or of all arrays in an .npz file.

Small arrays are read completely, and checked with the CRC-32 of the .npz file. Of large arrays,
only the rows of a batch are read. They are not mapped, because mapped memory would count as memory
of the rank.
"""
from __future__ import annotations

import itertools
import math
import os
import re
import zipfile
from collections.abc import Sequence
from io import BytesIO
from typing import IO, BinaryIO

import numpy as np

from chainermn._types import Object

_LOCAL_HEADER = 30  # bytes, before the name of a member of a zip file
_MAX_HEADER = 1 << 16  # bytes of the header of an array


class NpyShard:
    """An .npy or .npz file.

    Args:
        path: The file.
        memory: The maximum number of bytes to keep in memory. Rows of a larger file are read when
            they are needed. Compressed arrays and arrays in Fortran order are always read
            completely.

    Raises:
        ValueError, zipfile.BadZipFile: If the file is damaged, or if it contains arrays of
            different lengths or of Python objects.
    """

    def __init__(self, path: str, memory: int) -> None:
        self._file = open(path, 'rb')  # noqa: SIM115
        try:
            size = os.path.getsize(path)
            if path.endswith('.npz'):
                columns = _members(self._file, size <= memory)
            else:
                columns = {'': _column(self._file, 0, size, size <= memory)}
            lengths = {name: len(column) for name, column in columns.items()}
            if len({*lengths.values()}) != 1:
                raise ValueError(f'the arrays have different lengths: {lengths}'
                                 if lengths else 'the file contains no arrays')
        except BaseException:
            self.close()
            raise
        self._names = [*columns]
        self._is_tuple = all(re.fullmatch(r'arr_\d+', name) for name in columns)
        if self._is_tuple:
            self._names.sort(key=lambda name: int(name[4:]))
        self._columns = [columns[name] for name in self._names]

    def __len__(self) -> int:
        return len(self._columns[0])

    def read(self, indexes: np.ndarray) -> Sequence[Object]:
        """Return samples: arrays, tuples of ``arr_0``, ``arr_1``, ..., or dicts by array name."""
        rows = [column[indexes] for column in self._columns]
        if self._names == ['']:
            return [*rows[0]]
        samples = zip(*rows, strict=True)
        return [*samples] if self._is_tuple else [
            dict(zip(self._names, sample, strict=True)) for sample in samples]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _members(file: BinaryIO, is_small: bool) -> dict[str, np.ndarray | _Rows]:
    """Return the arrays in an .npz file."""
    columns: dict[str, np.ndarray | _Rows] = {}
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix('.npy')
            with archive.open(info) as member:  # checks the header
                if is_small or info.compress_type != zipfile.ZIP_STORED:
                    columns[name] = _read(member)
                    continue
            local = os.pread(file.fileno(), _LOCAL_HEADER, info.header_offset)
            begin = info.header_offset + _LOCAL_HEADER + sum(
                int.from_bytes(local[i:i + 2], 'little') for i in (26, 28))
            columns[name] = _column(file, begin, info.file_size, is_small=False)
    return columns


def _column(file: BinaryIO, begin: int, size: int, is_small: bool) -> np.ndarray | _Rows:
    """Return an array in an uncompressed file."""
    rows = _Rows(file, begin, size)
    return rows if rows.is_c_order and not is_small else rows.read()


def _read(member: IO[bytes]) -> np.ndarray:
    """Return an array in an .npz file."""
    array = np.lib.format.read_array(member, allow_pickle=False)
    if member.read(1):  # also compares the CRC-32
        raise zipfile.BadZipFile('there is data after the array')
    if not array.ndim:
        raise ValueError(_NO_DIMENSIONS)
    return array


_NO_DIMENSIONS = 'an array without dimensions has no samples'


class _Rows:
    """An array in a file. Its rows are read when they are needed.

    Args:
        file: The file.
        begin: The offset of the array's header in the file.
        size: The size of the header and the array in bytes.
    """

    def __init__(self, file: BinaryIO, begin: int, size: int) -> None:
        # NumPy reads headers only from files.
        header = BytesIO(os.pread(file.fileno(), min(_MAX_HEADER, size), begin))
        version = np.lib.format.read_magic(header)
        read = {(1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f'version {version} of the .npy format is not supported')
        self._shape, is_fortran, self._dtype = read(header)
        if self._dtype.hasobject:
            raise ValueError('arrays of Python objects (dtype object) are not supported, because '
                             'unpickling them can execute code. Save numeric arrays.')
        if not self._shape:
            raise ValueError(_NO_DIMENSIONS)
        self.is_c_order = not is_fortran or len(self._shape) == 1
        self._file, self._begin = file, begin + header.tell()
        self._row = math.prod(self._shape[1:]) * self._dtype.itemsize
        expected = header.tell() + self._shape[0] * self._row
        if size < expected or (begin and size > expected):
            raise ValueError('the file is truncated or damaged: expected an array of '
                             f'{expected:,} bytes, but found {size:,} bytes')

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, indexes: np.ndarray) -> np.ndarray:
        rows = np.empty((len(indexes), *self._shape[1:]), self._dtype)
        # Consecutive rows are read together.
        cuts = [0, *(np.flatnonzero(np.diff(indexes) != 1) + 1).tolist(), len(indexes)]
        for begin, end in itertools.pairwise(cuts):
            self._read_into(rows[begin:end], self._begin + int(indexes[begin]) * self._row)
        return rows

    def read(self) -> np.ndarray:
        """Return all rows."""
        array = np.empty(self._shape if self.is_c_order else self._shape[::-1], self._dtype)
        self._read_into(array, self._begin)
        return array if self.is_c_order else array.T

    def _read_into(self, array: np.ndarray, offset: int) -> None:
        rest = array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(b'')
        while rest:
            n = os.preadv(self._file.fileno(), [rest], offset)
            if n == 0:
                raise ValueError('the file was truncated while it was open')
            rest, offset = rest[n:], offset + n
