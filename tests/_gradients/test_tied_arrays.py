"""Arrays that share memory, in any layout."""


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


def test_gradients_of_pytorch():
    torch = pytest.importorskip('torch')
    tensors = [torch.ones(3) for _ in range(3)]
    arrays = [tensor.numpy() for tensor in tensors]
    assert tied_arrays.sharing_memory([*arrays, np.ones(3)]) == []
    assert tied_arrays.sharing_memory([*arrays, OTHER, tensors[1][1:].numpy()]) == [[1, 4]]
    parts = [torch.from_numpy(OTHER[:2]).numpy(), torch.from_numpy(OTHER[1:]).numpy()]
    assert tied_arrays.sharing_memory([*arrays, *parts]) == [[3, 4]]
    assert tied_arrays.sharing_memory([arrays[0], parts[1], OTHER]) == [[1, 2]]
