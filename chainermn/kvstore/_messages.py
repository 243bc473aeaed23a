"""What workers send to servers: one message of bytes for any number of keys.

A message is a row of entries. Each has a head of four int64 (the number of the key, the kind of the
entry, how many rows it names, the bytes of its values), then the row numbers as int64, then the
values; everything starts at a multiple of eight bytes.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

# Kinds of entries.
DENSE, COMPRESSED, ROWS = range(3)

_HEAD = 4
_WORD = 8


class Entry(NamedTuple):
    """What a message says of one key."""

    number: int
    kind: int
    row_ids: np.ndarray  # of ROWS
    values: Any  # flat; as bytes when it was received


_NO_ROWS = np.empty(0, np.int64)


def request(number: int, row_ids: np.ndarray | None = None) -> Entry:
    """An entry that asks for an array, or for some of its rows."""
    if row_ids is None:
        return Entry(number, DENSE, _NO_ROWS, b'')
    return Entry(number, ROWS, row_ids, b'')


def dense(number: int, values: Any) -> Entry:
    """An entry with a whole array or part."""
    return Entry(number, DENSE, _NO_ROWS, values)


def compressed(number: int, wire: Any) -> Entry:
    """An entry with a compressed array or part."""
    return Entry(number, COMPRESSED, _NO_ROWS, wire)


def buffers(entries: Sequence[Entry]) -> list[Any]:
    """What to send: buffers that form the message when they are joined."""
    found: list[Any] = []
    for number, kind, row_ids, values in entries:
        found += [np.array([number, kind, len(row_ids), memoryview(values).nbytes]), row_ids]
        found += padded(values)
    return found


def padded(values: Any) -> list[Any]:
    """Buffers of an array, up to a multiple of eight bytes."""
    contiguous: Any = values if isinstance(values, bytes) else np.ascontiguousarray(values)
    return [contiguous, bytes(-memoryview(contiguous).nbytes % _WORD)]


def entries(message: Any) -> Iterator[Entry]:
    """Reads a message, a flat uint8 array."""
    at = 0
    while at < len(message):
        number, kind, n_rows, n_bytes = message[at:at + _HEAD * _WORD].view(np.int64).tolist()
        at += _HEAD * _WORD
        row_ids = message[at:at + n_rows * _WORD].view(np.int64)
        at += n_rows * _WORD
        yield Entry(number, kind, row_ids, message[at:at + n_bytes])
        at += n_bytes + -n_bytes % _WORD


class Reader:
    """Takes arrays from a message in which they follow one another."""

    def __init__(self, message: Any) -> None:
        self._message = message
        self._at = 0

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """The next array; it shares memory with the message."""
        n_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        found = self._message[self._at:self._at + n_bytes].view(dtype).reshape(shape)
        self._at += n_bytes + -n_bytes % _WORD
        return found


def joined(parts: Sequence[Any]) -> Any:
    """Buffers as one flat uint8 array."""
    return np.frombuffer(b''.join(parts), np.uint8)
