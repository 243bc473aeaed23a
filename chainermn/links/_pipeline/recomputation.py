"""Repeating a forward step before its backward step instead of saving its graph."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import chainer
import numpy as np

from chainer_compat.graph.forward_state import ForwardState
from chainermn._types import Array, ArrayModule, Model, Object
from chainermn.links._pipeline.model import forget_states

_LENGTH = 4099  # a prime, so that it does not divide common sizes
#: GPU kernels sum in any order, and functions such as argmax amplify the differences.
_DEVICE_TOLERANCE = .01


class Recomputation:
    """The state before a forward step and fingerprints of its output.

    The state of CuPy's generator cannot be read. On a device, each forward step therefore seeds it
    from NumPy's generator.

    Args:
        link: The link whose state the forward step uses.
        previous: The recomputation of an earlier forward step of the same link.
    """

    def __init__(self, link: Model, previous: Recomputation | None = None) -> None:
        self._device = link.device
        self._seed: int | None = None
        if isinstance(self._device, chainer.backend.GpuDevice):
            import cupy

            self._seed = np.random.randint(2**31)
            with chainer.using_device(self._device):
                cupy.random.seed(self._seed)
        forget_states(link)
        self._state: ForwardState = ForwardState(
            [link], None if previous is None else previous._state)
        self._output: list[_Fingerprint] = []

    def set_output(self, arrays: Sequence[Array]) -> None:
        """Record the output of the forward step."""
        self._output = [*map(_Fingerprint.of, arrays)]

    def differences(self, arrays: Sequence[Array]) -> list[Array | bool] | None:
        """Compare an output with the output of the forward step.

        Returns:
            Whether each array differs; or ``None`` if the number of arrays, a shape or a dtype
            differs.
        """
        found = [*map(_Fingerprint.of, arrays)]
        if [(x.shape, x.dtype) for x in found] != [(x.shape, x.dtype) for x in self._output]:
            return None
        return [x.differs(y) for x, y in zip(self._output, found, strict=True)]

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Restore the state before the forward step, and afterwards the current state."""
        now = self._state.again()
        self._state.restore(keep_new_parameters=True)
        try:
            with self._random_numbers_of_device():
                yield
        finally:
            now.restore(keep_new_parameters=True)

    @contextlib.contextmanager
    def _random_numbers_of_device(self) -> Iterator[None]:
        if self._seed is None:
            yield
            return
        import cupy

        with chainer.using_device(self._device):
            generator = cupy.random.get_random_state()
            again = _second_generator(self._device.device.id)
            again.seed(self._seed)
            cupy.random.set_random_state(again)
        try:
            yield
        finally:
            with chainer.using_device(self._device):
                cupy.random.set_random_state(generator)


@functools.cache
def _second_generator(device_id: int) -> Object:
    """Return a generator for the current device. Creating one in each step would be slow."""
    import cupy

    return cupy.random.RandomState(0)


class _Fingerprint(NamedTuple):
    """The shape and dtype of an array, and sums of its elements with random signs.

    There are few sums. The sums of an array and of a changed array differ by about the norm of the
    change.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sums: Array

    @classmethod
    def of(cls, x: Array) -> _Fingerprint:
        """Return the fingerprint of an array without waiting for a device."""
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

    def differs(self, other: _Fingerprint) -> Array | bool:
        """Return whether another array differs by more than rounding errors.

        Does not wait for a device.

        Args:
            other: The fingerprint of the other array, which has the same shape and dtype.
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
