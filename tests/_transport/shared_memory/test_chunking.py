"""Arrays laid end to end and cut into chunks."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from chainermn._transport.shared_memory import chunking
from chainermn._transport.shared_memory.chunking import Piece

pytestmark = pytest.mark.mpi_skip

SIZES = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 100)), max_size=12)


def test_cut():
    assert chunking.cut([3, 0, 2], 4) == [[Piece(0, 0, 3, 0), Piece(2, 0, 1, 3)],
                                         [Piece(2, 1, 2, 0)]]
    assert chunking.cut([4, 4], 4) == [[Piece(0, 0, 4, 0)], [Piece(1, 0, 4, 0)]]
    assert chunking.cut([], 4) == chunking.cut([0, 0], 4) == []


@hypothesis.given(SIZES, st.integers(1, 40))
def test_chunks_cover_all_elements_in_order(sizes, length):
    arrays = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]) if sizes else []
    chunks = chunking.cut(sizes, length)
    covered = []
    for number, pieces in enumerate(chunks):
        chunk = np.full(length, -1)
        for piece in pieces:
            chunk[piece.place] = arrays[piece.array][piece.part]
        assert (chunk == -1).sum() == (length - pieces[-1].end)
        assert number == len(chunks) - 1 or pieces[-1].end == length
        covered += chunk[:pieces[-1].end].tolist()
    assert covered == list(range(sum(sizes)))


@hypothesis.given(SIZES, st.integers(1, 40), st.data())
def test_within(sizes, length, data):
    arrays = [1000 * n + np.arange(size) for n, size in enumerate(sizes)]
    for pieces in chunking.cut(sizes, length):
        chunk = np.concatenate([arrays[piece.array][piece.part] for piece in pieces])
        begin = data.draw(st.integers(0, length))
        end = data.draw(st.integers(begin, length))
        clipped = chunking.within(pieces, begin, end)
        for piece in clipped:
            assert begin <= piece.begin < piece.end <= end
            np.testing.assert_array_equal(chunk[piece.place], arrays[piece.array][piece.part])
        assert sum(piece.stop - piece.start for piece in clipped) == len(chunk[begin:end])


@pytest.mark.parametrize('length, count, expected', [
    (64, 2, [(0, 32), (32, 64)]),
    (100, 3, [(0, 32), (32, 64), (64, 100)]),
    (5, 2, [(0, 0), (0, 5)]),
    (33, 1, [(0, 33)]),
])
def test_slices(length, count, expected):
    assert chunking.slices(length, count) == expected


@hypothesis.given(SIZES, st.integers(1, 40))
def test_run_of_flat_arrays(sizes, length):
    arrays = [1000 * n + np.arange(size) for n, size in enumerate(sizes)]
    for pieces in chunking.cut(sizes, length):
        run = chunking.ChunkPieces(pieces, [(size,) for size in sizes])
        expected = np.concatenate([arrays[piece.array][piece.part] for piece in pieces])
        chunk = np.full(length, -1)
        views = run.of(arrays)
        for view, place in zip(views, run.places(chunk), strict=True):
            assert not view.size or any(np.shares_memory(view, array) for array in arrays)
            place[...] = view
        np.testing.assert_array_equal(chunk[:pieces[-1].end], expected)
        np.testing.assert_array_equal(np.concatenate(views), expected)


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
