"""RowSparse: an array that stores only some of its rows. All other rows are zero."""
from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TypeAlias

import chainer
import numpy as np

#: An array in host memory (NumPy) or on a GPU (CuPy).
Array: TypeAlias = np.ndarray | chainer.backends.cuda.ndarray


class RowSparse:
    """An array that stores only some of its rows. All other rows are zero.

    Args:
        row_ids: Indices of the stored rows: a one-dimensional array or list of integers from 0 to
            ``shape[0] - 1``, in any order. Rows with the same index are summed.
        rows: NumPy or CuPy array of shape ``(len(row_ids), *shape[1:])`` with any dtype.
        shape: Shape of the full array, with at least one dimension.

    Raises:
        TypeError: If ``rows`` is not an array, or ``row_ids`` does not contain integers.
        ValueError: If a row index is out of range, or a shape is wrong.

    Example:
        >>> x = chainermn.kvstore.RowSparse([2, 0], np.array([[5., 6.], [1., 2.]]), (3, 2))
        >>> x.todense()
        array([[1., 2.],
               [0., 0.],
               [5., 6.]])
    """

    #: Indices of the stored rows, a one-dimensional int64 array in host memory.
    row_ids: np.ndarray
    #: The stored rows, an array of shape ``(len(row_ids), *shape[1:])``.
    rows: Array
    #: Shape of the full array.
    shape: tuple[int, ...]

    def __init__(self, row_ids: Array | Sequence[int], rows: Array, shape: Sequence[int]) -> None:
        if not isinstance(rows, chainer.get_array_types()):
            raise TypeError(f'rows must be a NumPy or CuPy array, not {type(rows).__name__}')
        self.shape = tuple(operator.index(length) for length in shape)
        if not self.shape:
            raise ValueError('the shape of a RowSparse must have at least one dimension, not ()')
        self.row_ids = as_row_ids(row_ids, self.shape[0])
        self.rows = rows
        expected = (len(self.row_ids), *self.shape[1:])
        if rows.shape != expected:
            raise ValueError(f'rows must have shape {expected} (one row per row_id, for a full '
                             f'shape of {self.shape}), not {rows.shape}')

    @classmethod
    def from_dense(cls, x: Array) -> RowSparse:
        """Create a row-sparse array from the rows of an array that have a nonzero element.

        Args:
            x: NumPy or CuPy array with at least one dimension and any dtype.

        Returns:
            A row-sparse array with the same shape and dtype, on the same device.

        Example:
            >>> x = np.array([[0., 0.], [1., 2.], [0., 0.]])
            >>> chainermn.kvstore.RowSparse.from_dense(x)
            RowSparse(1 of 3 rows, float64 (3, 2))
        """
        xp = chainer.backend.get_array_module(x)
        ids = xp.flatnonzero((x != 0).any(axis=tuple(range(1, x.ndim))))
        return cls(ids, x[ids], x.shape)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the rows."""
        return self.rows.dtype

    def todense(self) -> Array:
        """Convert to a full array.

        Returns:
            A new array with the shape and dtype of this object, on the device of the rows.

        Example:
            >>> x = chainermn.kvstore.RowSparse([1], np.array([[1., 2.]]), (2, 2))
            >>> x.todense()
            array([[0., 0.],
                   [1., 2.]])
        """
        xp = chainer.backend.get_array_module(self.rows)
        dense = xp.zeros(self.shape, self.dtype)
        unique = self.unique()
        dense[xp.asarray(unique.row_ids)] = unique.rows
        return dense

    def unique(self) -> RowSparse:
        """Sum the rows with the same index and sort the rows by index.

        Returns:
            A new row-sparse array in host memory with unique indices in ascending order.

        Example:
            >>> x = chainermn.kvstore.RowSparse([1, 1], np.array([[1., 2.], [3., 4.]]), (2, 2))
            >>> x.unique().rows
            array([[4., 6.]])
        """
        rows = chainer.cuda.to_cpu(self.rows)
        ids, inverse = np.unique(self.row_ids, return_inverse=True)
        if len(ids) == len(self.row_ids):
            return RowSparse(ids, rows[np.argsort(self.row_ids)], self.shape)
        summed = np.zeros((len(ids), *self.shape[1:]), self.dtype)
        np.add.at(summed, inverse, rows)
        return RowSparse(ids, summed, self.shape)

    def __repr__(self) -> str:
        return (f'RowSparse({len(self.row_ids)} of {self.shape[0]} rows, {self.dtype} '
                f'{self.shape})')


def as_row_ids(row_ids: Array | Sequence[int], n_rows: int) -> np.ndarray:
    """Return row indices as a one-dimensional int64 array in host memory.

    Raises:
        TypeError: If ``row_ids`` is not a one-dimensional array of integers.
        ValueError: If an index is not between 0 and ``n_rows - 1``.
    """
    if isinstance(row_ids, chainer.get_array_types()):
        row_ids = chainer.cuda.to_cpu(row_ids)
    ids = np.asarray(row_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in 'iu'):
        raise TypeError('row_ids must be a one-dimensional array of integers, not '
                        f'an array of dtype {ids.dtype} and shape {ids.shape}')
    if ids.size and not (ids.min() >= 0 and ids.max() < n_rows):
        raise ValueError(f'row_ids must be from 0 to {n_rows - 1}, not from {ids.min()} to '
                         f'{ids.max()}')
    return ids.astype(np.int64)
