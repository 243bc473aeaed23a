"""Fingerprints of arrays: few numbers, which tell whether an array was computed again."""
from __future__ import annotations

import functools
from typing import NamedTuple

import chainer
import numpy as np

from chainermn._types import Array, ArrayModule

_LENGTH = 4099  # prime, so that it divides no usual size
#: Kernels of a GPU add in any order, and functions such as argmax amplify the differences.
_DEVICE_TOLERANCE = .01


class Fingerprint(NamedTuple):
    """An array's shape and dtype, and sums of its elements with random signs.

    Sums of an array and of a changed one differ by about the norm of the change.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sums: Array

    @classmethod
    def of(cls, x: Array) -> Fingerprint:
        """Return the fingerprint of an array.  Does not wait for a device."""
        dtype = x.dtype if x.dtype.kind == 'f' and x.dtype.itemsize > 2 else np.dtype('f')
        xp = chainer.backend.get_array_module(x)
        flat = x.reshape(-1)
        n = flat.size // _LENGTH
        with np.errstate(all='ignore'):
            rest = flat[n * _LENGTH:].astype(dtype)
            sums = rest if n == 0 else xp.concatenate([
                flat[:n * _LENGTH].reshape(n, _LENGTH).astype(dtype, copy=False)
                @ _signs(xp, dtype), rest])
        return cls(x.shape, x.dtype, sums)

    def differs(self, other: Fingerprint) -> Array | bool:
        """Return whether another array differs by more than rounding.  Does not wait for a device.

        Args:
            other: Its fingerprint, of the same shape and dtype.
        """
        xp = chainer.backend.get_array_module(self.sums)
        tolerance = np.finfo(self.dtype if self.dtype.kind == 'f' else np.float32).eps ** .5
        if xp is not np:
            tolerance = max(tolerance, _DEVICE_TOLERANCE)
        x, y = self.sums.astype('d'), other.sums.astype('d')
        is_finite = xp.isfinite(x) & xp.isfinite(y)
        x, y = (xp.where(is_finite, each, 0) for each in (x, y))
        with np.errstate(all='ignore'):
            return xp.square(y - x).sum() > float(tolerance)**2 * xp.square(x).sum()


@functools.cache
def _signs(xp: ArrayModule, dtype: np.dtype) -> Array:
    return xp.asarray(np.random.RandomState(0).randint(0, 2, _LENGTH) * 2 - 1, dtype)
