"""Random values in samples, and a comparison of the samples that were read with the originals."""

import numpy as np
from hypothesis import strategies as st

DTYPES = [
    '?', 'b', 'H', 'i', 'l', 'L', 'e', 'f', 'd', 'F', 'D', '>i4', '>f8', 'M8[s]', 'm8[ms]', 'S3',
    'U3', 'V5', 'i4,(2,)u8,S3']
#: Functions that draw objects other than arrays, by name.
PLAIN = {
    'int': lambda draw: int(draw.randint(2**40)),
    'float': lambda draw: draw.choice([draw.randn(), -0., np.inf]).item(),
    'bool': lambda draw: bool(draw.randint(2)),
    'str': lambda draw: f'é{draw.randint(10)}',
    'bytes': lambda draw: b'%d' % draw.randint(10),
    'list': lambda draw: [int(draw.randint(9)), .5],
}
LAYOUTS = {
    'C': lambda array: array, 'F': np.asfortranarray,
    'reversed': lambda array: array[::-1].copy()[::-1] if array.ndim else array,
    'scalar': lambda array: array.reshape(-1)[0] if array.size else array,
}

#: The name of a dtype or of a plain object, a shape and a layout.
kinds = st.tuples(
    st.sampled_from([*PLAIN, *DTYPES, *DTYPES]),
    st.lists(st.sampled_from([2, 3, 2, 1, 0]), max_size=3).map(tuple), st.sampled_from([*LAYOUTS]))


def make(draw, kind):
    """Return a random value.

    Args:
        draw: A RandomState.
        kind: A value of :data:`kinds`.
    """
    name, shape, layout = kind
    if name in PLAIN:
        return PLAIN[name](draw)
    dtype, n = np.dtype(name), int(np.prod(shape))
    if dtype.kind == 'U':
        data = draw.randint(1, 1000, 3 * n).astype('u4')
    else:  # draw no NUL, because NumPy removes it from the end of text
        data = draw.randint(1, 256, n * dtype.itemsize).astype('u1')
    return LAYOUTS[layout](np.ndarray(
        shape, dtype, (data & 1 if dtype.kind == 'b' else data).tobytes()).copy())


def assert_read(found, expected):
    """Assert that a sample is bitwise identical to one that was written, as NumPy stores it."""
    if isinstance(expected, dict):
        assert [*found] == [*expected]
        found, expected = (tuple(each.values()) for each in (found, expected))
    if isinstance(expected, tuple):
        assert type(found) is tuple and len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_read(one, other)
        return
    assert isinstance(found, (np.ndarray, np.generic))
    assert isinstance(found, np.ndarray) or not np.ndim(expected)
    found, expected = np.asarray(found), np.asarray(expected)
    native = expected.dtype.newbyteorder('=')
    assert (found.dtype.newbyteorder('='), found.shape) == (native, expected.shape)
    assert found.astype(native).tobytes() == expected.astype(native).tobytes()
