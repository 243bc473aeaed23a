"""Batches in parts, compared with NumPy."""

import chainer
import numpy as np
import pytest
from each_case import each_case

from chainermn.links._pipeline import micro_batches

pytestmark = pytest.mark.mpi_skip


@each_case('n_examples, n', [(0, 4), (1, 4), (3, 4), (4, 4), (13, 4), (16, 1)])
def test_bounds(n_examples, n):
    bounds = micro_batches.bounds(n_examples, n)
    sizes = [end - begin for begin, end in bounds]
    assert sum(sizes) == n_examples
    assert len(sizes) == max(1, min(n, n_examples))
    assert max(sizes) - min(sizes) <= 1
    assert [i for begin, end in bounds for i in range(begin, end)] == [*range(n_examples)]


def test_arguments():
    x = np.arange(12).reshape(6, 2)
    args = x, [*'abcdef'], {'y': (chainer.Variable(x), 3, None)}, np.array(5)
    assert micro_batches.count(args) == 6
    rows, letters, others, number = micro_batches.part(args, 2, 4)
    np.testing.assert_array_equal(rows, x[2:4])
    assert letters == ['c', 'd']
    np.testing.assert_array_equal(others['y'][0].array, x[2:4])
    assert others['y'][1:] == (3, None)
    assert number == 5


def test_numbers_of_examples():
    assert micro_batches.count(()) is None
    assert micro_batches.count((None, 3)) is None
    with pytest.raises(ValueError, match='different numbers of examples: 3, 2'):
        micro_batches.count((np.ones(3), np.ones(2)))
