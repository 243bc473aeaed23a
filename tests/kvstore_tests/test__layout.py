"""The parts of an array are all of it, each element once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chainermn.kvstore._layout import Layout

SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@given(SHAPES, st.integers(1, 5), st.integers(0, 9), st.integers(0, 30), st.booleans())
def test_parts(shape, n_servers, number, bound, is_row_sparse):
    if not shape:
        is_row_sparse = False
    layout = Layout.of('key', number, shape, np.dtype(int), is_row_sparse, n_servers, bound)
    x = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    assert layout.is_cut == (n_servers > 1 and shape != () and x.size >= bound)
    assert set(layout.parts) == (set(range(n_servers)) if layout.is_cut else {number % n_servers})
    parts = {server: layout.part(x, server) for server in layout.parts}
    for server, part in parts.items():
        assert part.shape == layout.part_shape(server)
        if is_row_sparse:
            np.testing.assert_array_equal(part, x[layout.rows(server)])
    np.testing.assert_array_equal(
        np.concatenate([parts[server].reshape(-1) for server in sorted(parts)]), x.reshape(-1))
    if layout.is_cut:
        lengths = [len(part) for part in parts.values()]
        assert max(lengths) - min(lengths) <= 1


def test_parts_are_views():
    x = np.zeros((3, 4))
    layout = Layout.of(0, 0, x.shape, x.dtype, False, 5, 1)
    for server in layout.parts:
        layout.part(x, server)[...] += 1
    np.testing.assert_array_equal(x, np.ones((3, 4)))


@pytest.mark.parametrize('is_row_sparse, text', [
    (False, "'W': float32 (2, 3)"), (True, "'W': row-sparse float32 (2, 3)")])
def test_text(is_row_sparse, text):
    assert str(Layout.of('W', 0, (2, 3), np.dtype('f'), is_row_sparse, 1, 1)) == text
