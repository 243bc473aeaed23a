"""Gradients of several updates, accumulated until their mean is exchanged."""
from __future__ import annotations

import numpy as np

from chainermn._types import Array, Model, Parameter


class Accumulation:
    """Accumulates the gradients of ``n`` updates, and returns their mean.

    If an update does not use a parameter, its gradient counts as zero.  float16 is accumulated in
    float32 and rounded once.

    Args:
        n: Number of updates.  With 1, do not call :meth:`add`.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        #: Number of updates so far.
        self.count: int = 0
        self._sums: dict[int, Array] = {}  # by id of the parameter

    def completed(self, param: Parameter, grad: Array) -> Array:
        """Return the mean that :meth:`add` would store if this is the last of the ``n`` updates.

        Args:
            param: A parameter.
            grad: Its gradient in this update; it is not changed.
        """
        if self.n == 1:
            return grad
        wide = np.promote_types(grad.dtype, np.float32)
        total = grad.astype(wide) if id(param) not in self._sums else self._sums[id(param)] + grad
        return _divided(total, self.n, param.dtype)

    def add(self, model: Model) -> bool:
        """Move the gradients of a model into the accumulation.

        Args:
            model: The model; after the last update its gradients are the means.

        Returns:
            Whether this was the last of the ``n`` updates.
        """
        self.count += 1
        for param in model.params(include_uninit=False):
            grad = param.grad
            if grad is None:  # not used, or a shared parameter that was already added
                continue
            if id(param) in self._sums:
                self._sums[id(param)] += grad
            else:
                self._sums[id(param)] = grad.astype(np.promote_types(grad.dtype, np.float32))
            param.cleargrad()
        if self.count < self.n:
            return False
        self.give(model, self.n)
        return True

    def give(self, model: Model, divisor: int) -> None:
        """Move the accumulated gradients back into the model.

        Args:
            model: The model.
            divisor: Number to divide them by.
        """
        for param in model.params(include_uninit=False):
            total = self._sums.pop(id(param), None)
            if total is not None:
                param.grad = _divided(total, divisor, param.dtype)
        self.clear()

    def clear(self) -> None:
        """Drop the accumulated gradients."""
        self.count = 0
        self._sums.clear()


def _divided(total: Array, divisor: int, dtype: np.dtype) -> Array:
    """Divide a sum in place, and round it once."""
    total *= total.dtype.type(1 / divisor)
    with np.errstate(over='ignore'):
        return total.astype(dtype, copy=False)
