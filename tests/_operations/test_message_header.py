"""The header of a message: round trip, size, and its text in reports."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from chainermn._operations import message_header
from chainermn._operations.call_signature import DTYPES, MAX_INLINE_DIMS
from chainermn._operations.message_header import (
    IN_MESSAGE,
    Kind,
    MessageHeader,
    of_array,
    of_object,
    of_tuple,
    read,
    shapes,
)

pytestmark = pytest.mark.mpi_skip

SHAPES = st.lists(st.integers(0, 2**40), max_size=64).map(tuple)
PAYLOADS = st.integers(IN_MESSAGE, 2**31 - 1)


@hypothesis.given(SHAPES, st.sampled_from(DTYPES), PAYLOADS, st.booleans(), st.binary(max_size=9))
def test_arrays(shape, dtype, payload, device, data):
    packed = of_array(shape, dtype, payload, device)
    assert len(packed) <= message_header.MAX_SIZE
    assert len(packed) == message_header.SIZE or len(shape) > MAX_INLINE_DIMS
    header, body = read(packed + data)
    assert header == MessageHeader(
        Kind.ARRAY, payload, code=DTYPES.index(dtype), device=device, shape=shape)
    assert header.dtype == dtype
    assert body == data


@pytest.mark.parametrize('packed, header', [
    (of_tuple(70000, 3, 5), MessageHeader(Kind.TUPLE, 5, 70000, shape=(3,))),
    (of_tuple(0, 0, 0), MessageHeader(Kind.TUPLE, 0, 0, shape=(0,))),
    (of_object(2**31 - 1), MessageHeader(Kind.OBJECT, 2**31 - 1)),
    (message_header.ERROR, MessageHeader(Kind.ERROR)),
])
def test_others(packed, header):
    assert len(packed) == message_header.SIZE
    assert packed[0] == header.kind
    assert read(packed + b'data') == (header, b'data')
    assert header.arguments == ''


def test_size_keeps_data_aligned():
    """The receiver copies an array from behind the header."""
    assert message_header.SIZE % 16 == 0
    assert message_header.SIZE <= 128


def test_shapes():
    expected = [(), (3, 0), tuple(range(MAX_INLINE_DIMS))]
    headers = bytearray().join(of_array(shape, np.dtype('f4')) for shape in expected)
    assert shapes(headers) == expected


@pytest.mark.parametrize('shape, dtype, text', [
    ((2, 3), 'f4', 'float32 (2, 3)'), ((), 'i8', 'int64'), ((0,), '?', 'bool (0,)'),
    ((1,) * 9, 'f2', 'float16 (1, 1, 1, 1, 1, 1, 1, 1, 1)')])
def test_text(shape, dtype, text):
    assert read(of_array(shape, np.dtype(dtype)))[0].arguments == text
