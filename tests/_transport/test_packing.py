"""Packing arrays into one flat buffer, and unpacking."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest

from chainermn._transport import packing

pytestmark = pytest.mark.mpi_skip

FLOATS = st.sampled_from(['float16', 'float32', 'float64'])
ARRAYS = st.lists(
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
               elements=st.integers(-100, 100)), min_size=1, max_size=5)


@hypothesis.given(ARRAYS, FLOATS)
def test_pack_and_unpack(arrays, dtype):
    arrays = [x.T if n % 2 else x for n, x in enumerate(arrays)]
    buffer = packing.pack(arrays, dtype)
    assert buffer.dtype == dtype
    np.testing.assert_array_equal(buffer, np.concatenate([x.flatten() for x in arrays]))
    copies = [np.full_like(x, 7) for x in arrays]
    packing.unpack(buffer, copies, 1.)
    for x, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(copy, x)
    packing.unpack(buffer, copies, .5)
    for x, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(copy, x / 2)


def test_one_contiguous_array_is_not_copied():
    x = np.arange(6.).reshape(2, 3)
    assert np.shares_memory(packing.pack([x]), x)
    assert not np.shares_memory(packing.pack([x.T]), x)
    assert not np.shares_memory(packing.pack([x], np.float32), x)
    assert not np.shares_memory(packing.pack([x, x]), x)


def test_unpack_in_place_over_the_buffer():
    x = np.arange(6.).reshape(2, 3)
    packing.unpack(packing.pack([x]), [x], .5)
    np.testing.assert_array_equal(x, np.arange(6.).reshape(2, 3) / 2)
    packing.unpack(packing.pack([x]), [x])
    np.testing.assert_array_equal(x, np.arange(6.).reshape(2, 3) / 2)


def test_unpack_rounds_float16_once():
    """5 / 3 in float16, not 5 times a rounded 1 / 3."""
    x = np.zeros(1, np.float16)
    assert np.float16(5) * np.float16(1 / 3) != np.float16(5 / 3)
    for dtype in (np.float16, np.float32):
        packing.unpack(np.array([5.], dtype), [x], 1 / 3)
        assert x[0] == np.float16(5 / 3)
    packing.unpack(np.array([3 * 65504.], np.float32), [x], 1 / 3)
    assert x[0] == 65504


@hypothesis.given(ARRAYS)
def test_parts_are_views(arrays):
    buffer = packing.pack(arrays)
    found = packing.parts(buffer, [x.shape for x in arrays])
    for x, part in zip(arrays, found, strict=True):
        np.testing.assert_array_equal(part, x)
        assert part.size == 0 or np.shares_memory(part, buffer)


def test_unpacked():
    """Each part has the dtype of its array; one that needs no cast is a view."""
    arrays = [np.zeros((2, 1), np.float32), np.zeros((), np.float16), np.zeros(3, np.float16)]
    buffer = np.array([1, 2, 3, 1 / 3, 70000, 5], np.float32)
    first, second, third = packing.unpacked(buffer, arrays)
    assert np.shares_memory(first, buffer)
    np.testing.assert_array_equal(first, np.array([[1], [2]], np.float32), strict=True)
    np.testing.assert_array_equal(second, np.array(3, np.float16), strict=True)
    np.testing.assert_array_equal(third, np.array([1 / 3, np.inf, 5], np.float16), strict=True)
    large = np.array([2**62 + 1, 3])
    one, two = packing.unpacked(large, [large[:1], large[1:]])
    assert (one[0], two[0]) == (2**62 + 1, 3)
