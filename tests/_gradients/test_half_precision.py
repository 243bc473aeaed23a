"""Casts give the bits of NumPy's casts, or for bfloat16 those of a definition in integers."""

import numpy as np
import pytest

from chainermn._gradients import half_precision

pytestmark = pytest.mark.mpi_skip

HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
FINITE = HALVES[np.isfinite(HALVES)]


def borders():
    """All finite float16 values and the borders between them, with the next float32 values."""
    ordered = np.unique(FINITE.astype(np.float64))
    middle = (ordered[1:] + ordered[:-1]) / 2
    exact = np.concatenate([ordered, middle, [65520, -65520]]).astype(np.float32)
    return np.concatenate([exact, np.nextafter(exact, np.float32(np.inf)),
                           np.nextafter(exact, np.float32(-np.inf)), [-0.0]]).astype(np.float32)


def random_bits(n=1 << 20):
    x = np.random.RandomState(0).randint(0, 1 << 32, n, np.uint32).view(np.float32)
    return x[~np.isnan(x)]


@pytest.mark.parametrize('x', [
    borders(), random_bits(), np.array([1e5, -1e38, np.inf, -np.inf, 1e-45], np.float32),
    np.array([1, np.nan, -np.inf, 1e-7], np.float32), np.empty(0, np.float32)],
    ids=['borders', 'random', 'large', 'nan', 'empty'])
def test_to_float16(x):
    with np.errstate(over='ignore'):
        expected = x.astype(np.float16)
        result = half_precision.to_float16(x)
    assert result.dtype == np.float16
    np.testing.assert_array_equal(result.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize('x', [FINITE, HALVES, HALVES[:0]], ids=['finite', 'all', 'empty'])
def test_to_float32(x):
    result = half_precision.to_float32(x)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result.view(np.uint32), x.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize('x', [random_bits(), np.array([1, np.inf, -np.inf, 3.4e38], np.float32)],
                         ids=['random', 'large'])
def test_to_bfloat16(x):
    bits = x.view(np.uint32).astype(np.uint64)
    upper, rest = bits >> np.uint64(16), bits & np.uint64(0xffff)
    is_up = (rest > 0x8000) | ((rest == 0x8000) & (upper % 2 == 1))
    np.testing.assert_array_equal(half_precision.to_bfloat16(x), upper + is_up)


def test_to_bfloat16_keeps_nans():
    nans = np.array([0x7fc00000, 0x7f800001, 0xffffffff, 0x7fffffff, 0], np.uint32)
    bits = half_precision.to_bfloat16(nans.view(np.float32)).astype(np.uint32) << 16
    np.testing.assert_array_equal(np.isnan(bits.view(np.float32)), [True] * 4 + [False])
