"""``cut`` returns the selected examples of a dataset, in any order."""

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

DATASETS = {
    'array': np.arange(3 * N).reshape(N, 3),
    'list': [str(i) for i in range(N)],
    'tuple': tuple(range(N)),
    'TupleDataset': TupleDataset(np.arange(N), [str(i) for i in range(N)]),
    'DictDataset': DictDataset(x=np.arange(N), t=list(range(N))),
    'SubDataset': SubDataset(np.arange(N + 4), 1, N + 1),
    'SubDataset with order': SubDataset(
        np.arange(N + 4), 3, N + 3, np.random.RandomState(0).permutation(N + 4)),
    'ConcatenatedDataset': ConcatenatedDataset(np.arange(5), [], ['a', 'b'], (5, 6, 7, 8, 9)),
    'TransformDataset': TransformDataset(np.arange(N), lambda example: -example),
    'nested': SubDataset(
        ConcatenatedDataset(
            TransformDataset(TupleDataset(np.arange(5), range_list := list(range(5))), list),
            SubDataset(range_list * 4, 1, 15, np.random.RandomState(1).permutation(20))),
        2, N + 2, np.random.RandomState(2).permutation(19)),
}


@pytest.mark.parametrize('begin, end', [(0, N), (3, 7), (N - 1, N)])
def test_neighbors_are_cut_out_of_an_array_without_a_copy(begin, end):
    array = DATASETS['array']
    assert np.shares_memory(cut(array, np.arange(begin, end)), array)


@pytest.mark.parametrize('inside', [
    lambda x: x, lambda x: TupleDataset(np.arange(N), x), lambda x: DictDataset(a=x),
    lambda x: SubDataset(x, 1, 3), lambda x: ConcatenatedDataset([1], x),
    lambda x: TransformDataset(x, str),
])
def test_what_is_not_known_is_not_cut(inside):
    with pytest.raises(NotInMemoryError, match='range'):
        cut(inside(range(N)), np.arange(2))
