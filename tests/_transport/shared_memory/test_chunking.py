"""Arrays laid end to end and cut into chunks."""

import numpy as np
import pytest

from chainermn._transport.shared_memory import chunking
from chainermn._transport.shared_memory.chunking import Piece

pytestmark = pytest.mark.mpi_skip


def test_cut():
    assert chunking.cut([3, 0, 2], 4) == [[Piece(0, 0, 3, 0), Piece(2, 0, 1, 3)],
                                         [Piece(2, 1, 2, 0)]]
    assert chunking.cut([4, 4], 4) == [[Piece(0, 0, 4, 0)], [Piece(1, 0, 4, 0)]]
    assert chunking.cut([], 4) == chunking.cut([0, 0], 4) == []


@pytest.mark.parametrize('length, count, expected', [
    (64, 2, [(0, 32), (32, 64)]),
    (100, 3, [(0, 32), (32, 64), (64, 100)]),
    (5, 2, [(0, 0), (0, 5)]),
    (33, 1, [(0, 33)]),
])
def test_slices(length, count, expected):
    assert chunking.slices(length, count) == expected


def test_run_does_not_copy_complete_arrays():
    arrays = [np.arange(3), np.arange(6).reshape(2, 3).T, np.array(9), np.zeros((0, 2), int),
              np.arange(4)]
    first, second = [chunking.ChunkPieces(pieces, [array.shape for array in arrays])
                     for pieces in chunking.cut([array.size for array in arrays], 11)]
    assert (first.flat, second.flat) == ([4], [4])
    views = first.of(arrays)
    assert all(view is array for view, array in zip(views, arrays[:4], strict=False))
    chunk = np.full(11, -1)
    for view, place in zip(views, first.places(chunk), strict=True):
        place[...] = view
    assert chunk.tolist() == [0, 1, 2, 0, 3, 1, 4, 2, 5, 9, 0]
    assert second.of(arrays)[0].tolist() == [1, 2, 3]
