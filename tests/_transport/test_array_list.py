"""Lists of arrays: grouped for an exchange, together with the arrays for their results."""

import numpy as np
import pytest

from chainermn._transport import array_buffers
from chainermn._transport.array_list import ArrayList, map_groups, small_together

pytestmark = pytest.mark.mpi_skip


def ids(arrays):
    return [*map(id, arrays)]


def test_one_dtype_is_one_group():
    arrays = ArrayList.of([np.zeros((2, 3), 'f4'), np.zeros((), 'f4')])
    assert (arrays.dtypes, arrays.shapes, arrays.on_host) == ((np.dtype('f4'),), ((2, 3), ()), True)
    results = [np.empty_like(x) for x in arrays]
    assert arrays.by_dtype() == [(arrays, arrays)]
    (group, targets), = arrays.by_dtype(results)
    assert group is arrays
    assert targets is results


def test_by_dtype():
    a, b, c, d = (np.zeros(1, dtype) for dtype in ('f4', 'f2', 'f4', 'f8'))
    arrays = ArrayList.of([a, b, c, d])
    results = [np.empty_like(x) for x in arrays]
    groups = arrays.by_dtype(results)
    assert [ids(group) for group, _ in groups] == [ids([a, c]), ids([b]), ids([d])]
    assert [ids(targets) for _, targets in groups] == [
        ids([results[0], results[2]]), ids([results[1]]), ids([results[3]])]
    assert [group.dtypes for group, _ in groups] == [(x.dtype,) for x in (a, b, d)]
    assert ArrayList.of([]).by_dtype() == []


def test_repeated_array_has_two_results():
    x, y = np.zeros(1, 'f4'), np.zeros(1, 'f8')
    results = [np.empty(1, 'f4'), np.empty(1, 'f4'), np.empty(1, 'f8')]
    (_, first), (_, second) = ArrayList.of([x, x, y]).by_dtype(results)
    assert ids([*first, *second]) == ids(results)


def test_map_groups():
    a, b, c, d = (np.full(2, n, dtype) for n, dtype in enumerate(('f4', 'f2', 'f4', 'f8')))
    arrays, groups = ArrayList.of([a, b, c, d]), []

    def double(group):
        groups.append(ids(group))
        return [x * 2 for x in group]

    for x, y in zip(arrays, map_groups(arrays, double), strict=True):
        assert y.dtype == x.dtype
        np.testing.assert_array_equal(y, x * 2)
    assert groups == [ids([a, c]), ids([b]), ids([d])]
    groups.clear()
    map_groups(arrays, double, array_buffers.summed_in)
    assert groups == [ids([a, b, c]), ids([d])]
    groups.clear()
    map_groups(ArrayList.of([a, c]), double)
    assert groups == [ids([a, c])]
    assert map_groups(ArrayList.of([]), double) == []


def test_small_together():
    class Subclass(np.ndarray):
        pass

    small, other, third = np.zeros(2, 'f4'), np.zeros(1, 'f8'), np.zeros(2, 'f4')
    large, special, fourth = np.zeros(9, 'f4'), small.view(Subclass), np.zeros(2, 'f4')
    arrays = [small, large, other, third, special, fourth]
    results = [x.copy() for x in arrays]
    groups = small_together(arrays, results, small=8, capacity=20)
    expected = [[0, 3], [1], [2], [4], [5]]  # a third one would make the first group too large
    assert [ids(group) for group, _ in groups] == [
        ids([arrays[i] for i in group]) for group in expected]
    assert [ids(targets) for _, targets in groups] == [
        ids([results[i] for i in group]) for group in expected]
    assert small_together([], [], 8, 20) == []
