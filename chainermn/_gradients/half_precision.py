"""Casts between float32 and 16-bit formats on CPUs, with the same results as IEEE 754 casts.

NumPy casts float16 one value at a time; these functions use vector instructions. They process the
values in chunks that fit into the CPU cache.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

#: Number of values per chunk: a multiple of 16 that fits into the CPU cache.
CHUNK = 1 << 15

_SMALLEST_NORMAL = np.uint32(127 - 14 << 23)  # 2**-14 as float32: the smallest normal float16
_OVERFLOW = np.uint32(127 + 16 << 23)  # 2**16 as float32, which rounds to infinity
_EXPONENT = np.uint32(255 << 23)  # mask of the exponent; infinity
_EXTRA_BITS = np.uint32(13 << 23)  # exponent bits of 2**13: float32 has 13 more significand bits


def to_float16(x: np.ndarray) -> np.ndarray:
    """Round flat float32 values to the nearest float16."""
    return _by_chunk(_to_float16, x, np.dtype(np.float16))


def to_float32(x: np.ndarray) -> np.ndarray:
    """Cast flat float16 values, without rounding."""
    return _by_chunk(_to_float32, x, np.dtype(np.float32))


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round flat float32 values to the nearest bfloat16, as uint16. NaNs are preserved."""
    return _by_chunk(_to_bfloat16, x, np.dtype(np.uint16))


def _by_chunk(cast: Callable[[np.ndarray], np.ndarray], x: np.ndarray, dtype: np.dtype
              ) -> np.ndarray:
    result = np.empty(x.size, dtype)
    for start in range(0, x.size, CHUNK):
        result[start:start + CHUNK] = cast(x[start:start + CHUNK])
    return result


def _to_float16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    value = bits & np.uint32(0x7fffffff)
    if value.max() > _EXPONENT:  # there are NaNs
        return x.astype(np.float16)
    np.minimum(value, _OVERFLOW, out=value)
    # The last bit of `shift` has the value of the last bit of the result, so adding `shift` rounds
    # to it. Subtracting the bits of `shift` leaves the significand. Numbers below the smallest
    # normal one use its exponent.
    shift = np.maximum(value, _SMALLEST_NORMAL)
    shift &= _EXPONENT
    shift += _EXTRA_BITS
    as_float = value.view(np.float32)
    as_float += shift.view(np.float32)
    value -= shift
    shift -= _SMALLEST_NORMAL + _EXTRA_BITS
    shift >>= np.uint32(13)
    value += shift
    sign = bits >> np.uint32(16)
    sign &= np.uint32(0x8000)
    value |= sign
    return value.astype(np.uint16).view(np.float16)


def _to_float32(x: np.ndarray) -> np.ndarray:
    if (x.view(np.uint16) & np.uint16(0x7fff)).max() >= 0x7c00:  # infinities or NaNs
        return x.astype(np.float32)
    bits = x.view(np.int16).astype(np.int32)
    bits <<= np.int32(13)
    bits &= np.int32(-0x70002000)  # clear the copies of the sign bit
    value = bits.view(np.float32)
    value *= np.float32(2 ** 112)  # the exponent bias of float32 is larger by 112
    return value


def _to_bfloat16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7fff)  # adding 0x7fff plus the lowest kept bit rounds ties to even
    rounded += bits
    upper = _upper(rounded)
    is_nan = np.isnan(x)
    if is_nan.any():
        # The payload of a NaN may be in the lower half only, or overflow when it is rounded.
        upper[is_nan] = _upper(bits)[is_nan] | np.uint16(0x40)
    return upper


def _upper(bits: np.ndarray) -> np.ndarray:
    return (bits >> np.uint32(16)).astype(np.uint16)
