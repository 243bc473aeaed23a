"""RowSparse, compared with dense arrays."""

import numpy as np
import pytest

from chainermn.kvstore import RowSparse


@pytest.mark.parametrize('shape', [(4,), (4, 3), (4, 3, 2), (0, 3)])
def test_from_dense_and_back(shape):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    x[1:2] = 0
    found = RowSparse.from_dense(x)
    assert (found.shape, found.dtype) == (shape, np.float32)
    assert 1 not in found.row_ids and 0 not in (found.row_ids if x.ndim == 1 else [])
    np.testing.assert_array_equal(found.todense(), x)


def test_repeated_rows_are_summed():
    x = RowSparse([2, 0, 2], np.array([[1, 2], [3, 4], [5, 6]]), (3, 2))
    np.testing.assert_array_equal(x.todense(), [[3, 4], [0, 0], [6, 8]])
    unique = x.unique()
    assert unique.row_ids.tolist() == [0, 2]
    np.testing.assert_array_equal(unique.rows, [[3, 4], [6, 8]])
    np.testing.assert_array_equal(x.rows[0], [1, 2])  # is unchanged


def test_unsorted_rows():
    x = RowSparse(np.array([2, 1], np.uint8), np.array([[1.], [2]]), (3, 1))
    assert x.row_ids.dtype == np.int64
    np.testing.assert_array_equal(x.todense(), [[0], [2], [1]])
    assert repr(x) == 'RowSparse(2 of 3 rows, float64 (3, 1))'


@pytest.mark.parametrize('row_ids, rows, shape, kind, text', [
    ([0, 3], np.zeros((2, 3)), (3, 3), ValueError, 'from 0 to 2, not from 0 to 3'),
    ([-1], np.zeros((1, 3)), (3, 3), ValueError, 'from 0 to 2'),
    ([0.5], np.zeros((1, 3)), (3, 3), TypeError, 'array of integers'),
    ([[0]], np.zeros((1, 3)), (3, 3), TypeError, 'one-dimensional'),
    ([0], np.zeros((2, 3)), (3, 3), ValueError, r'shape \(1, 3\), not \(2, 3\)'),
    ([0], np.zeros((1, 2)), (3, 3), ValueError, r'shape \(1, 3\), not \(1, 2\)'),
    ([0], [[1, 2, 3]], (3, 3), TypeError, 'NumPy or CuPy array'),
    ([], np.zeros(0), (), ValueError, 'at least one dimension'),
])
def test_errors(row_ids, rows, shape, kind, text):
    with pytest.raises(kind, match=text):
        RowSparse(row_ids, rows, shape)
