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


@pytest.mark.parametrize('row_ids, rows, shape, kind, text', [
    ([0, 3], np.zeros((2, 3)), (3, 3), ValueError, 'from 0 to 2, not from 0 to 3'),
    ([-1], np.zeros((1, 3)), (3, 3), ValueError, 'from 0 to 2'),
    ([0.5], np.zeros((1, 3)), (3, 3), TypeError, 'array of integers'),
    ([[0]], np.zeros((1, 3)), (3, 3), TypeError, 'one-dimensional'),
    ([0], np.zeros((2, 3)), (3, 3), ValueError, r'shape \(1, 3\) .* not \(2, 3\)'),
    ([0], np.zeros((1, 2)), (3, 3), ValueError, r'shape \(1, 3\) .* not \(1, 2\)'),
    ([0], [[1, 2, 3]], (3, 3), TypeError, 'NumPy or CuPy array'),
    ([], np.zeros(0), (), ValueError, 'at least one dimension'),
])
def test_errors(row_ids, rows, shape, kind, text):
    with pytest.raises(kind, match=text):
        RowSparse(row_ids, rows, shape)
