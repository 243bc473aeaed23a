"""A list of arrays that are sent together, with cached dtypes and shapes; groups of arrays."""
from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from chainermn._transport import array_buffers
from chainermn._types import Array

_T = TypeVar('_T')

_dtype_of, _shape_of = operator.attrgetter('dtype'), operator.attrgetter('shape')


class ArrayList(list[Array]):
    """A list of arrays that are sent together. It must not be modified.

    Attributes:
        shapes: The shape of each array.
        dtypes: The dtype of each array, or a single dtype if all are the same.
        on_host: Whether all arrays are NumPy arrays.
        on_device: Whether the first array is on a device.

    Example:
        >>> from chainermn.communicators.transport import ArrayList
        >>> ArrayList.of([np.ones(2), np.ones((3, 1))]).shapes
        ((2,), (3, 1))
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    on_host: bool
    on_device: bool

    @classmethod
    def of(cls, arrays: Iterable[Array]) -> ArrayList:
        """Return a list of the arrays.

        Example:
            >>> from chainermn.communicators.transport import ArrayList
            >>> ArrayList.of([np.ones(2), np.ones((3, 1))]).dtypes
            (dtype('float64'),)
        """
        found = cls(arrays)
        found.shapes = tuple(map(_shape_of, found))
        found.dtypes = common(tuple(map(_dtype_of, found)))
        found.on_host = are_numpy(found)
        found.on_device = not found.on_host and array_buffers.on_device(found[0])
        return found

    def by_owner(self, owners: Sequence[int]) -> list[tuple[ArrayList, Sequence[int]]]:
        """Group arrays that can share a buffer, like :meth:`by_dtype`, each with its owner.

        Example:
            >>> from chainermn.communicators.transport import ArrayList
            >>> arrays = ArrayList.of([np.ones(2), np.ones(1, np.float32), np.ones(1)])
            >>> [owners for _, owners in arrays.by_owner([0, 1, 1])]
            [[0, 1], [1]]
        """
        return self._by_dtype([*owners])

    def by_dtype(self, results: Sequence[Array] | None = None
                 ) -> list[tuple[ArrayList, Sequence[Array]]]:
        """Group arrays that can share a buffer: same dtype, all on the host or on a device.

        Args:
            results: An array for the result of each array, or ``None`` for the arrays themselves.

        Returns:
            The groups, each with the arrays for its results.

        Example:
            >>> from chainermn.communicators.transport import ArrayList
            >>> arrays = ArrayList.of([np.ones(2), np.ones(1, np.float32), np.ones(1)])
            >>> [group for group, _ in arrays.by_dtype()]
            [[array([1., 1.]), array([1.])], [array([1.], dtype=float32)]]
        """
        return self._by_dtype(self if results is None else results)

    def _by_dtype(self, others: Sequence[_T]) -> list[tuple[ArrayList, Sequence[_T]]]:
        if len(self.dtypes) <= 1 and self.on_host:
            return [(self, others)] if self else []
        groups = _grouped(self, others, lambda x: (x.dtype, array_buffers.on_device(x)))
        return [(ArrayList.of(xs), some) for xs, some in groups]


def map_groups(arrays: ArrayList, function: Callable[[ArrayList], Sequence[Array]],
               dtype_of: Callable[[np.dtype], np.dtype] = np.dtype) -> list[Array]:
    """Apply a function to groups of arrays that can share a buffer.

    Args:
        arrays: The arrays.
        function: Function that returns an array for each array of a group.
        dtype_of: Function that returns the dtype of the buffer for arrays of a dtype.

    Returns:
        The results, in the order of the arrays.
    """
    if len(arrays.dtypes) <= 1 and arrays.on_host:
        return [*function(arrays)] if arrays else []
    results: list[Array] = [None] * len(arrays)
    on_host = arrays.on_host
    for group, places in _grouped(arrays, range(len(arrays)), lambda x: (
            dtype_of(x.dtype), not on_host and array_buffers.on_device(x))):
        for i, y in zip(places, function(ArrayList.of(group)), strict=True):
            results[i] = y
    return results


def small_together(arrays: Sequence[Array], results: Sequence[Array], small: int, capacity: int
                   ) -> list[tuple[list[Array], list[Array]]]:
    """Group NumPy arrays of one dtype and of at most ``small`` bytes; leave other arrays alone.

    Args:
        arrays: The arrays.
        results: An array for the result of each array.
        small: The maximum size in bytes of an array that is grouped with others.
        capacity: The maximum size of a group in bytes.

    Returns:
        The groups, each with the arrays for its results.
    """
    filling: dict[np.dtype, tuple[object, int]] = {}  # the last group, and the bytes left in it

    def group_of(x: Array) -> object:
        nbytes, dtype = x.nbytes, x.dtype
        if nbytes > small or type(x) is not np.ndarray:
            return object()
        group, room = filling.get(dtype, (None, -1))
        if nbytes > room:
            group, room = object(), capacity
        filling[dtype] = group, room - nbytes
        return group

    return _grouped(arrays, results, group_of)


def _grouped(arrays: Iterable[Array], others: Iterable[_T], key: Callable[[Array], Hashable]
             ) -> list[tuple[list[Array], list[_T]]]:
    """Group arrays with the same key, together with another value each, in order of appearance."""
    groups: dict[Hashable, tuple[list[Array], list[_T]]] = {}
    for x, other in zip(arrays, others, strict=True):
        xs, some = groups.setdefault(key(x), ([], []))
        xs.append(x)
        some.append(other)
    return [*groups.values()]


def are_numpy(arrays: Sequence[Array]) -> bool:
    """Return whether all arrays are NumPy arrays (not of a subclass)."""
    return [*map(type, arrays)].count(np.ndarray) == len(arrays)


def common(dtypes: tuple[np.dtype, ...]) -> tuple[np.dtype, ...]:
    """Return the dtypes; a single one if all are the same."""
    return dtypes[:1] if dtypes and dtypes.count(dtypes[0]) == len(dtypes) else dtypes
