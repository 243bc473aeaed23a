"""Gradients of several updates, added up until their mean is exchanged."""
from __future__ import annotations

from typing import Any

import numpy as np


class Accumulation:
    """Takes the gradients of ``n`` updates and gives back their mean.

    A parameter that some of them did not use counts with zero there.  float16 is added in float32
    and rounded once.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        #: Of how many updates the gradients are held.
        self.count = 0
        self._sums: dict[int, Any] = {}  # by id of the parameter

    @property
    def is_next_last(self) -> bool:
        """Whether the next gradients are the last of ``n``."""
        return self.count == self.n - 1

    def completed(self, param: Any, grad: Any) -> Any:
        """What :meth:`add` would make of the gradient of a parameter, if it is the last of ``n``.

        The gradient itself stays as it is.
        """
        if self.n == 1:
            return grad
        wide = np.promote_types(grad.dtype, np.float32)
        total = grad.astype(wide) if id(param) not in self._sums else self._sums[id(param)] + grad
        return _divided(total, self.n, param.dtype)

    def add(self, model: Any) -> bool:
        """Takes the gradients out of a model.

        Returns:
            Whether they were the last of ``n``.  Then their mean is in the model.
        """
        if self.n == 1:
            return True
        self.count += 1
        for param in model.params(include_uninit=False):
            grad = param.grad
            if grad is None:  # not used, or shared and taken already
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

    def give(self, model: Any, divisor: int) -> None:
        """Puts what was taken back into the model, divided by ``divisor``."""
        for param in model.params(include_uninit=False):
            total = self._sums.pop(id(param), None)
            if total is not None:
                param.grad = _divided(total, divisor, param.dtype)
        self.clear()

    def clear(self) -> None:
        """Forgets what was taken."""
        self.count = 0
        self._sums.clear()


def _divided(total: Any, divisor: int, dtype: np.dtype) -> Any:
    """Divides a sum in place, and rounds it once."""
    total *= total.dtype.type(1 / divisor)
    with np.errstate(over='ignore'):
        return total.astype(dtype, copy=False)
