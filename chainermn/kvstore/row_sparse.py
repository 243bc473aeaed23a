"""Arrays of which only some rows are there."""
from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np


class RowSparse:
    """An array given by some of its rows; all other rows are 0.

    Args:
        row_ids: Integers, the numbers of the rows that are there: one-dimensional, in any order.
            Rows with the same number are added.
        rows: Array (NumPy or CuPy) of those rows: ``rows.shape == (len(row_ids), *shape[1:])``.
        shape: Shape of the whole array.

    >>> x = RowSparse([2, 0], np.array([[5., 6.], [1., 2.]]), (3, 2))
    >>> x.todense()
    array([[1., 2.],
           [0., 0.],
           [5., 6.]])
    """

    #: The numbers of the rows, int64, on the host.
    row_ids: np.ndarray
    rows: Any
    shape: tuple[int, ...]

    def __init__(self, row_ids: Any, rows: Any, shape: Sequence[int]) -> None:
        if not isinstance(rows, chainer.get_array_types()):
            raise TypeError(f'rows has to be a numpy or cupy array, not {type(rows).__name__}')
        self.shape = tuple(operator.index(length) for length in shape)
        if not self.shape:
            raise ValueError('an array without dimensions has no rows')
        self.row_ids = as_row_ids(row_ids, self.shape[0])
        self.rows = rows
        if rows.shape != (len(self.row_ids), *self.shape[1:]):
            raise ValueError(f'{len(self.row_ids)} rows of an array of shape {self.shape} have the '
                             f'shape {(len(self.row_ids), *self.shape[1:])}, not {rows.shape}')

    @classmethod
    def from_dense(cls, x: Any) -> RowSparse:
        """Makes a row-sparse array of those rows of an array in which something is not 0."""
        xp = chainer.backend.get_array_module(x)
        ids = xp.flatnonzero((x != 0).any(axis=tuple(range(1, x.ndim))))
        return cls(ids, x[ids], x.shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the rows."""
        return self.rows.dtype

    def todense(self) -> Any:
        """Returns the whole array, where the rows are."""
        xp = chainer.backend.get_array_module(self.rows)
        dense = xp.zeros(self.shape, self.dtype)
        unique = self.unique()
        dense[xp.asarray(unique.row_ids)] = unique.rows
        return dense

    def unique(self) -> RowSparse:
        """Returns the same array with each row once, in order, on the host."""
        rows = chainer.cuda.to_cpu(self.rows)
        ids, where = np.unique(self.row_ids, return_inverse=True)
        if len(ids) == len(self.row_ids):
            return RowSparse(ids, rows[np.argsort(self.row_ids)], self.shape)
        total = np.zeros((len(ids), *self.shape[1:]), self.dtype)
        np.add.at(total, where, rows)
        return RowSparse(ids, total, self.shape)

    def __repr__(self) -> str:
        return (f'RowSparse({len(self.row_ids)} of {self.shape[0]} rows, {self.dtype} '
                f'{self.shape})')


def as_row_ids(row_ids: Any, n_rows: int) -> np.ndarray:
    """Returns numbers of rows as int64 on the host, or raises."""
    if isinstance(row_ids, chainer.get_array_types()):
        row_ids = chainer.cuda.to_cpu(row_ids)
    ids = np.asarray(row_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in 'iu'):
        raise TypeError('row_ids has to be a one-dimensional array of integers, not '
                        f'{ids.dtype} {ids.shape}')
    if ids.size and not (ids.min() >= 0 and ids.max() < n_rows):
        raise ValueError(f'row_ids has to be from 0 to {n_rows - 1}, not from {ids.min()} to '
                         f'{ids.max()}')
    return ids.astype(np.int64)
