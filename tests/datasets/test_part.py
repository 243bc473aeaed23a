"""Cutting without copies, and what is not cut; laws/test_order.py compares the examples."""

import numpy as np
import pytest
from chainer.datasets import (
    ConcatenatedDataset,
    DictDataset,
    SubDataset,
    TransformDataset,
    TupleDataset,
)

from chainermn.datasets._part import NotInMemoryError, cut

pytestmark = pytest.mark.mpi_skip

N = 12


@pytest.mark.parametrize('begin, end', [(0, N), (3, 7), (N - 1, N)])
def test_neighbors_are_cut_out_of_an_array_without_a_copy(begin, end):
    array = np.arange(3 * N).reshape(N, 3)
    assert np.shares_memory(cut(array, np.arange(begin, end)), array)


@pytest.mark.parametrize('inside', [
    lambda x: x, lambda x: TupleDataset(np.arange(N), x), lambda x: DictDataset(a=x),
    lambda x: SubDataset(x, 1, 3), lambda x: ConcatenatedDataset([1], x),
    lambda x: TransformDataset(x, str),
])
def test_what_is_not_known_is_not_cut(inside):
    with pytest.raises(NotInMemoryError, match='range'):
        cut(inside(range(N)), np.arange(2))
