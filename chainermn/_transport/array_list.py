"""A list of arrays exchanged together, with cached dtypes and shapes."""
from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import numpy as np

from chainermn._transport import array_buffers
from chainermn._types import Array

_dtype_of, _shape_of = operator.attrgetter('dtype'), operator.attrgetter('shape')


class ArrayList(list[Array]):
    """A list of arrays exchanged together; must not be modified.

    Attributes:
        shapes: The shape of each array.
        dtypes: The dtype of each array, or a single dtype if all are equal.
        on_host: Whether all are NumPy arrays.
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

    def by_dtype(self, results: Sequence[Array] | None = None
                 ) -> list[tuple[ArrayList, Sequence[Array]]]:
        """Group arrays that can share a buffer: same dtype, all on the host or on a device.

        Args:
            results: An array for the result of each array; by default the array itself.

        Returns:
            The groups, each with the arrays for its results.

        Example:
            >>> from chainermn.communicators.transport import ArrayList
            >>> arrays = ArrayList.of([np.ones(2), np.ones(1, np.float32), np.ones(1)])
            >>> [group for group, _ in arrays.by_dtype()]
            [[array([1., 1.]), array([1.])], [array([1.], dtype=float32)]]
        """
        if results is None:
            results = self
        if len(self.dtypes) <= 1 and self.on_host:
            return [(self, results)] if self else []
        groups: dict[tuple[np.dtype, bool], tuple[list[Array], list[Array]]] = {}
        for x, y in zip(self, results, strict=True):
            xs, ys = groups.setdefault((x.dtype, array_buffers.on_device(x)), ([], []))
            xs.append(x)
            ys.append(y)
        return [(ArrayList.of(xs), ys) for xs, ys in groups.values()]


def are_numpy(arrays: Sequence[Array]) -> bool:
    """Whether all arrays are NumPy arrays (of no subclass)."""
    return [*map(type, arrays)].count(np.ndarray) == len(arrays)


def common(dtypes: tuple[np.dtype, ...]) -> tuple[np.dtype, ...]:
    """Return the dtypes; a single one if all are equal."""
    return dtypes[:1] if dtypes and dtypes.count(dtypes[0]) == len(dtypes) else dtypes
