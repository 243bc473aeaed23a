"""Lists of arrays: grouped for an exchange, together with the arrays for their results."""

import numpy as np
import pytest

from chainermn._transport.array_list import ArrayList

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
