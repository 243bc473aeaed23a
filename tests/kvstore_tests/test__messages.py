"""Messages arrive as they were written."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chainermn.kvstore import _messages

pytestmark = pytest.mark.mpi_skip

ARRAYS = st.tuples(st.sampled_from(['int8', 'float16', 'float32', 'complex128']),
                   st.integers(0, 20)).map(lambda said: np.arange(said[1]).astype(said[0]))
ENTRIES = st.one_of(
    st.tuples(st.integers(0, 2**40), ARRAYS).map(lambda said: _messages.dense(*said)),
    st.tuples(st.integers(0, 9), ARRAYS).map(lambda said: _messages.compressed(*said)),
    st.tuples(st.integers(0, 9), st.none() | st.lists(st.integers(0, 2**50)).map(np.array)).map(
        lambda said: _messages.request(said[0], None if said[1] is None else
                                       said[1].astype(np.int64))))


@given(st.lists(ENTRIES, max_size=5))
def test_entries(entries):
    message = _messages.joined(_messages.buffers(entries))
    assert (message.dtype, message.ndim, len(message) % 8) == (np.uint8, 1, 0)
    found = list(_messages.entries(message))
    assert len(found) == len(entries)
    for one, entry in zip(found, entries, strict=True):
        assert (one.number, one.kind) == (entry.number, entry.kind)
        assert one.row_ids.tolist() == entry.row_ids.tolist()
        assert one.values.tobytes() == bytes(memoryview(entry.values))


@given(st.lists(ARRAYS, max_size=5))
def test_arrays_one_after_another(arrays):
    reader = _messages.Reader(_messages.joined(
        [buffer for x in arrays for buffer in _messages.padded(x)]))
    for x in arrays:
        found = reader.take(x.shape, x.dtype)
        assert found.dtype == x.dtype
        np.testing.assert_array_equal(found, x)
