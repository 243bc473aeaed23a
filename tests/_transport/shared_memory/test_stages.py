"""The stages of a chunk, run in one process for all ranks."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from chainermn._transport.shared_memory import chunking
from chainermn._transport.shared_memory.stages import CopiedChunk, DirectChunk, PackedChunk

pytestmark = pytest.mark.mpi_skip

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)


@hypothesis.given(sizes=SIZES, ranks=st.integers(1, 4), slices=st.integers(1, 4),
                  dtype=st.sampled_from(['float16', 'float32', 'float64']),
                  scale=st.sampled_from([None, 1 / 3]), few=st.booleans())
def test_sum(sizes, ranks, slices, dtype, scale, few):
    slices = min(slices, ranks)
    random = np.random.RandomState(0)
    arrays = [[random.normal(size=size).astype(dtype) for size in sizes] for _ in range(ranks)]
    wide = np.promote_types(dtype, np.float32)
    expected = np.concatenate(arrays[0]).astype(wide)
    for own in arrays[1:]:
        expected = expected + np.concatenate(own)
    if scale is not None:
        scale = wide.type(scale)
        expected = expected * scale
    pieces, = chunking.cut(sizes, sum(sizes))
    output = np.full(sum(sizes), np.nan, wide)
    inputs = [output.copy() for _ in range(ranks)]
    owned = chunking.slices(output.size, slices) + [(output.size,) * 2] * (ranks - slices)
    run = chunking.ChunkPieces(pieces, [(size,) for size in sizes])
    chunks = [
        DirectChunk(pieces, inputs, rank, output, owned[rank], None) if few else
        PackedChunk(run, inputs, rank, output, owned[rank], None)
        for rank in range(ranks)]
    for chunk, own in zip(chunks, arrays, strict=True):
        chunk.pack(own)
    for chunk, own in zip(chunks, arrays, strict=True):
        chunk.reduce(own, scale)
    for chunk, own in zip(chunks, arrays, strict=True):
        chunk.unpack(own, scale)
        assert np.concatenate(own).tobytes() == expected.astype(dtype).tobytes()


@hypothesis.given(sizes=SIZES, ranks=st.integers(1, 3))
def test_copy(sizes, ranks):
    """The arrays belong to the ranks in turn."""
    values = [np.arange(size, dtype=np.uint8) + n for n, size in enumerate(sizes)]
    owners = [n % ranks for n in range(len(sizes))]
    arrays = [[value.copy() if owner == rank else np.zeros_like(value)
               for value, owner in zip(values, owners, strict=True)] for rank in range(ranks)]
    pieces, = chunking.cut(sizes, sum(sizes))
    output = np.zeros(sum(sizes), np.uint8)
    runs = [(owners[piece.array], chunking.ChunkPieces([piece], [(size,) for size in sizes]))
            for piece in pieces]
    chunks = [CopiedChunk([(owner == rank, run) for owner, run in runs], output, None)
              for rank in range(ranks)]
    for chunk, own in zip(chunks, arrays, strict=True):
        chunk.pack(own)
        chunk.reduce(own, None)
    for chunk, own in zip(chunks, arrays, strict=True):
        chunk.unpack(own, None)
        for array, expected in zip(own, values, strict=True):
            np.testing.assert_array_equal(array, expected)
