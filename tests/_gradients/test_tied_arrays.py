"""Arrays that share memory, in any layout."""

import itertools

import numpy as np
import pytest

from chainermn._gradients import tied_arrays

pytestmark = pytest.mark.mpi_skip

WHOLE = np.arange(24.).reshape(4, 6)
OTHER = np.ones(3)


@pytest.mark.parametrize('arrays, expected', [
    ([], []),
    ([OTHER], []),
    ([np.ones(3), np.ones(3), np.float64(1), np.array(1.)], []),
    ([WHOLE, WHOLE], [[0, 1]]),
    ([WHOLE, OTHER, WHOLE.T], [[0, 2]]),
    ([WHOLE[1], WHOLE[2], WHOLE[3, :3], WHOLE[3, 3:]], []),
    ([WHOLE[:, ::2], WHOLE[:, 1::2]], []),  # interleaved
    ([WHOLE[::-1], WHOLE[0]], [[0, 1]]),
    ([WHOLE[:2], OTHER, WHOLE[1:3], OTHER[:1], WHOLE[2:]], [[0, 2, 4], [1, 3]]),  # a chain
    ([WHOLE[:0], WHOLE, np.empty((0, 2))], []),
    ([OTHER[1:2].reshape(()), OTHER], [[0, 1]]),
])
def test_groups(arrays, expected):
    assert tied_arrays.sharing_memory(arrays) == expected


def test_views_of_a_buffer_that_is_no_array():
    buffer = bytearray(64)
    arrays = [np.frombuffer(buffer)[:4], np.frombuffer(buffer)[4:], np.frombuffer(buffer)[3:5]]
    assert tied_arrays.sharing_memory(arrays[:2]) == []
    assert tied_arrays.sharing_memory(arrays) == [[0, 1, 2]]


def test_random_views():
    random = np.random.RandomState(0)
    for _ in range(200):
        whole = np.zeros((6, 8))
        views = []
        for _ in range(4):
            view = whole[tuple(slice(*sorted(random.randint(n + 1, size=2)), random.randint(1, 4))
                               for n in whole.shape)][::random.choice([-1, 1])]
            views.append(view.T if random.rand() < .5 else view)
        touched = []
        for number, view in enumerate(views, 1):
            whole[...] = 0
            view[...] = number
            touched.append({*np.flatnonzero(whole)})
        groups = [{i} for i in range(4)]
        for i, j in itertools.combinations(range(4), 2):
            one, other = (next(group for group in groups if k in group) for k in (i, j))
            if touched[i] & touched[j] and one is not other:
                one |= other
                groups.remove(other)
        expected = sorted(sorted(group) for group in groups if len(group) > 1)
        assert tied_arrays.sharing_memory(views) == expected
