"""Sharding: how arrays are split over the servers, and the messages that carry the shards.

A message carries shards of any number of keys to or from one server. It is a sequence of entries.
Each entry consists of four int64 numbers (index of the key, kind of the entry, number of row
indices, number of bytes of the values), the row indices as int64, and the values. Each part starts
at a multiple of eight bytes. The values have the dtype of the key, or :func:`sum_dtype` of it if
they are a sum of several values.
"""
from __future__ import annotations

import math
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import chainer
import numpy as np

from chainermn.kvstore.row_sparse import Array, RowSparse

#: A key.
Key: TypeAlias = int | str

#: The part of an array that a pull reads: the rows with these indices (ascending int64), or the
#: full array (``None``).
Rows: TypeAlias = np.ndarray | None

#: Compresses a flat array. The second argument identifies the array.
Compress: TypeAlias = Callable[[Array, Hashable], Array]

#: C-ordered bytes of a message.
Buffer: TypeAlias = bytes | memoryview


class KeyLayout(NamedTuple):
    """The distribution of the array of one key over the servers.

    One server stores a small array. A large array is split into one shard per server: a row-sparse
    array is split between rows, any other array as if it were flat.
    """

    key: Key
    #: Index of the key, in the order of initialization.
    key_id: int
    shape: tuple[int, ...]
    dtype: np.dtype
    is_row_sparse: bool
    #: The shard of each server: ``...`` for the full array, or a range of rows or elements.
    shards: dict[int, slice | types.EllipsisType]

    @classmethod
    def of(cls, key: Key, key_id: int, shape: tuple[int, ...], dtype: np.dtype,
           is_row_sparse: bool, n_servers: int, bound: float) -> KeyLayout:
        """Distribute an array. Arrays with at least ``bound`` elements are split."""
        shards: dict[int, slice | types.EllipsisType] = {key_id % n_servers: ...}
        if n_servers > 1 and shape and math.prod(shape) >= bound:
            length = shape[0] if is_row_sparse else math.prod(shape)
            ends = [length * server // n_servers for server in range(n_servers + 1)]
            shards = {server: slice(ends[server], ends[server + 1]) for server in range(n_servers)}
        return cls(key, key_id, shape, dtype, is_row_sparse, shards)

    @property
    def is_split(self) -> bool:
        """Whether several servers store a shard."""
        return len(self.shards) > 1

    def shard(self, x: Array, server: int) -> Array:
        """Return a server's shard of the full array, as a view where possible."""
        where = self.shards[server]
        if where is ...:
            return x
        return x[where] if self.is_row_sparse else x.reshape(-1)[where]

    def shard_shape(self, server: int) -> tuple[int, ...]:
        """Return the shape of a server's shard."""
        where = self.shards[server]
        if isinstance(where, types.EllipsisType):
            return self.shape
        length = where.stop - where.start
        return (length, *self.shape[1:]) if self.is_row_sparse else (length,)

    def elements(self, server: int) -> tuple[int, int]:
        """Return the first element and the end of a server's shard of a dense array."""
        where = self.shards.get(server, slice(0, 0))
        if isinstance(where, types.EllipsisType):
            return 0, math.prod(self.shape)
        return where.start, where.stop

    def shard_rows(self, server: int) -> range:
        """Return the range of rows of a row-sparse array that a server stores."""
        where = self.shards[server]
        return range(self.shape[0])[where] if isinstance(where, slice) else range(self.shape[0])

    def slice_of(self, row_ids: np.ndarray, server: int) -> slice:
        """Return the slice of ``row_ids``, which are ascending, that a server stores."""
        rows = self.shard_rows(server)
        return slice(*np.searchsorted(row_ids, [rows.start, rows.stop]))

    def __str__(self) -> str:
        kind = 'row-sparse ' if self.is_row_sparse else ''
        return f'{self.key!r}: {kind}{self.dtype} {self.shape}'


def sum_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype for sums of values: float32 for float16, which could overflow."""
    return np.dtype(np.float32) if dtype == np.float16 else dtype


# --- arrays to messages and back -----------------------------------------------------------------

# Kinds of entries.
DENSE, COMPRESSED, ROWS = range(3)


class Entry(NamedTuple):
    """One key in a message."""

    key_id: int
    kind: int
    row_ids: np.ndarray  # only for ROWS
    values: np.ndarray  # empty in a request to read; flat uint8 after decoding


_NO_ROWS = np.empty(0, np.int64)
_NO_VALUES = np.empty(0, np.uint8)


def shard_values(layouts: Sequence[KeyLayout], values: Sequence[Array | RowSparse], n_servers: int,
                 compress: Compress | None = None) -> dict[int, list[Entry]]:
    """Split values into shards.

    Args:
        layouts: The layouts of the keys.
        values: An array for each key, or a :class:`RowSparse` with unique, ascending indices in
            host memory.
        n_servers: Number of servers.
        compress: Function that compresses floating-point arrays, or ``None``.

    Returns:
        The entries to send to each server.
    """
    entries: dict[int, list[Entry]] = {server: [] for server in range(n_servers)}
    for layout, x in zip(layouts, values, strict=True):
        for server in layout.shards:
            entries[server].append(_entry(layout, x, server, compress))
    return entries


def _entry(layout: KeyLayout, x: Array | RowSparse, server: int, compress: Compress | None
           ) -> Entry:
    if isinstance(x, RowSparse):
        mine = layout.slice_of(x.row_ids, server)
        return Entry(layout.key_id, ROWS, x.row_ids[mine], x.rows[mine])
    shard = layout.shard(x, server)
    if compress is None or layout.dtype.kind != 'f':
        return Entry(layout.key_id, DENSE, _NO_ROWS, chainer.cuda.to_cpu(shard))
    compressed = compress(shard.reshape(-1), (layout.key, server))
    return Entry(layout.key_id, COMPRESSED, _NO_ROWS, chainer.cuda.to_cpu(compressed))


def shard_reads(layouts: Sequence[KeyLayout], rows: Sequence[Sequence[Rows]], n_servers: int
                ) -> dict[int, list[Entry]]:
    """Split reads of arrays into reads of shards.

    Args:
        layouts: The layouts of the keys.
        rows: A list of reads for each key: the rows to read, or ``None`` for the full array.
        n_servers: Number of servers.

    Returns:
        The entries to send to each server, without values.
    """
    entries: dict[int, list[Entry]] = {server: [] for server in range(n_servers)}
    for layout, reads in zip(layouts, rows, strict=True):
        for server in layout.shards:
            for ids in reads:
                entries[server].append(
                    Entry(layout.key_id, DENSE, _NO_ROWS, _NO_VALUES) if ids is None else
                    Entry(layout.key_id, ROWS, ids[layout.slice_of(ids, server)], _NO_VALUES))
    return entries


def join_shards(layouts: Sequence[KeyLayout], rows: Sequence[Sequence[Rows]],
                replies: Mapping[int, np.ndarray]) -> list[list[np.ndarray]]:
    """Join the shards that the servers sent in reply to :func:`shard_reads`.

    Args:
        layouts: The layouts of the keys.
        rows: The ``rows`` that were passed to :func:`shard_reads`.
        replies: The reply of each server: a flat uint8 array with the arrays in the order of the
            entries, each padded (see :func:`pad`).

    Returns:
        A list of new arrays for each key, one for each read, with the rows or the full array.
    """
    replies = dict(replies)

    def take(server: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        n_bytes = math.prod(shape) * dtype.itemsize
        array = replies[server][:n_bytes].view(dtype).reshape(shape)
        replies[server] = replies[server][n_bytes + -n_bytes % _ALIGNMENT:]
        return array

    joined = []
    for layout, reads in zip(layouts, rows, strict=True):
        arrays = [np.empty(layout.shape if ids is None else (len(ids), *layout.shape[1:]),
                           layout.dtype) for ids in reads]
        for server in layout.shards:
            for ids, x in zip(reads, arrays, strict=True):
                part = layout.shard(x, server) if ids is None else x[layout.slice_of(ids, server)]
                part[...] = take(server, part.shape, layout.dtype)
        joined.append(arrays)
    return joined


# --- messages as bytes ---------------------------------------------------------------------------

_ALIGNMENT = 8
_HEAD = 4 * _ALIGNMENT


def encode(entries: Sequence[Entry]) -> list[Buffer]:
    """Return buffers that form a message when they are joined."""
    buffers: list[Buffer] = []
    for key_id, kind, row_ids, values in entries:
        head = np.array([key_id, kind, len(row_ids), values.nbytes], np.int64)
        buffers += [head.data, row_ids.data, *pad(values)]
    return buffers


def decode(message: np.ndarray) -> Iterator[Entry]:
    """Yield the entries of a message (a flat uint8 array). They share its memory."""
    at = 0
    while at < len(message):
        key_id, kind, n_rows, n_bytes = message[at:at + _HEAD].view(np.int64).tolist()
        at += _HEAD
        row_ids = message[at:at + 8 * n_rows].view(np.int64)
        at += 8 * n_rows
        yield Entry(key_id, kind, row_ids, message[at:at + n_bytes])
        at += n_bytes + -n_bytes % _ALIGNMENT


def pad(x: np.ndarray) -> list[Buffer]:
    """Return buffers with the bytes of an array, padded to a multiple of eight bytes."""
    contiguous = np.ascontiguousarray(x)
    return [contiguous.data, bytes(-contiguous.nbytes % _ALIGNMENT)]


def join(buffers: Sequence[Buffer]) -> np.ndarray:
    """Join buffers into one flat, read-only uint8 array."""
    return np.frombuffer(b''.join(buffers), np.uint8)
