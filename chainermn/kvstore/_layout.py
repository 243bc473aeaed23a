"""Where the array of a key is: on one server, or in parts on all of them."""
from __future__ import annotations

import math
import types
from typing import Any, NamedTuple

import numpy as np

#: A key.
Key = int | str


class Layout(NamedTuple):
    """Where the array of one key is.

    A large array is cut into as many parts as there are servers: a row-sparse one between its
    rows, any other as if it were flat.
    """

    key: Key
    number: int  # of the key, in the order of initialization
    shape: tuple[int, ...]
    dtype: np.dtype
    is_row_sparse: bool
    #: By server: ``...`` for the whole array, or a range of its rows or of its elements.
    parts: dict[int, slice | types.EllipsisType]

    @classmethod
    def of(cls, key: Key, number: int, shape: tuple[int, ...], dtype: np.dtype,
           is_row_sparse: bool, n_servers: int, bound: float) -> Layout:
        """Lays out an array; one with ``bound`` elements or more is cut."""
        length = shape[0] if is_row_sparse else math.prod(shape)
        parts: dict[int, slice | types.EllipsisType] = {number % n_servers: ...}
        if n_servers > 1 and shape and math.prod(shape) >= bound:
            ends = [length * server // n_servers for server in range(n_servers + 1)]
            parts = {server: slice(ends[server], ends[server + 1]) for server in range(n_servers)}
        return cls(key, number, shape, dtype, is_row_sparse, parts)

    @property
    def is_cut(self) -> bool:
        """Whether more than one server has a part."""
        return len(self.parts) > 1

    def part(self, x: Any, server: int) -> Any:
        """The part of the whole array that a server has; a view where it can be."""
        where = self.parts[server]
        if where is ...:
            return x
        return x[where] if self.is_row_sparse else x.reshape(-1)[where]

    def part_shape(self, server: int) -> tuple[int, ...]:
        """The shape of that part."""
        where = self.parts[server]
        if isinstance(where, types.EllipsisType):
            return self.shape
        length = where.stop - where.start
        return (length, *self.shape[1:]) if self.is_row_sparse else (length,)

    def rows(self, server: int) -> range:
        """The rows of a row-sparse array that a server has."""
        where = self.parts[server]
        return range(self.shape[0])[where] if isinstance(where, slice) else range(self.shape[0])

    def __str__(self) -> str:
        kind = 'row-sparse ' if self.is_row_sparse else ''
        return f'{self.key!r}: {kind}{self.dtype} {self.shape}'
