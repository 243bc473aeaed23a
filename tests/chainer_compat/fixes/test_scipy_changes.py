"""F.sparse_matmul multiplies matrices, forward and backward."""

import itertools

import chainer
import chainer.functions as F
import numpy as np
import pytest

pytestmark = pytest.mark.mpi_skip


def dense_of(row, column, shape):
    """Return the function that makes the dense matrix of the elements' values."""
    def dense(data):
        y = np.zeros((*data.shape[:-1], *shape))
        for index in np.ndindex(data.shape):
            if row[index] >= 0:
                y[(*index[:-1], row[index], column[index])] = data[index]
        return y
    return dense


@pytest.mark.sample(20)
@pytest.mark.parametrize('left', [True, False])
@pytest.mark.parametrize('batch', [(), (2,)])
@pytest.mark.parametrize('order', ['C', 'F', 'other'])
@pytest.mark.parametrize('dtypes', ['ee', 'ef', 'fe', 'fd', 'dd'])
def test_sparse_matmul(check, normal, left, batch, order, dtypes):
    matrix = normal(*batch, 3, 4, dtype=dtypes[0])
    matrix[np.abs(matrix) < .5] = 0
    coo = chainer.utils.to_coo(matrix)
    # The same elements row by row, column by column, or in no order; a batch is padded with -1.
    key = {'C': coo.row * 4 + coo.col, 'F': coo.col * 3 + coo.row, 'other': coo.row * 5 % 3}[order]
    places = np.argsort(np.where(coo.row < 0, 99, key), axis=-1, kind='stable')
    data, row, column = (np.take_along_axis(x, places, -1)
                         for x in (coo.data.array, coo.row, coo.col))
    dense = dense_of(row, column, (3, 4))
    wide = np.result_type(*dtypes)
    low = min(dtypes, key=lambda c: 'efd'.index(c))
    for transa, transb in itertools.product([False, True], repeat=2):
        rows, columns = (4, 3) if (transa if left else transb) else (3, 4)
        shape = (columns, 2) if left else (2, rows)
        shape = shape[::-1] if (transb if left else transa) else shape

        def reference(data, b):
            a = dense(data)
            a, b = (a, b) if left else (b, a)
            return (a.swapaxes(-1, -2) if transa else a) @ (b.swapaxes(-1, -2) if transb else b)  # noqa: B023

        def function(data, b):
            a = chainer.utils.CooMatrix(data.array, row, column, (3, 4), order)
            a.data = data
            return F.sparse_matmul(*(a, b) if left else (b, a), transa=transa, transb=transb)  # noqa: B023

        y = check(function, reference, data, normal(*batch, *shape, dtype=dtypes[1]), dtype=low)
        assert y.dtype == wide
