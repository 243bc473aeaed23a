"""Gradients of a pipeline: collected during a schedule and passed to the parameters later.

``Optimizer.update(pipeline, x, t)`` calls the pipeline, then ``cleargrads``, then ``backward()`` of
the loss. The pipeline has already computed the gradients by then, so the node of the loss stores
them.
"""
from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import chainer
from chainer.utils import force_array

from chainer_compat.updates import gradient_memory
from chainermn._types import Array, Parameter, Variable
from chainermn.functions._node import Gradients, Indexes, Node


class Collected:
    """The sums of the gradients that a schedule computes.

    Args:
        params: The parameters, without duplicates.

    Attributes:
        params: The parameters.
        grads: The sums of their gradients; ``None`` for parameters without gradients.
    """

    def __init__(self, params: Sequence[Parameter]) -> None:
        self.params = params
        self.grads: list[Array | None] = [None] * len(params)
        self._sums: set[int] = set()  # indexes of arrays that nothing else refers to

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the gradients computed within the context, then restore earlier gradients."""
        before = [param.grad_var if param.is_initialized else None for param in self.params]
        for param in self.params:
            param.cleargrad()
        try:
            yield
        finally:
            for param, grad in zip(self.params, before, strict=True):
                param.grad_var = grad

    def add(self) -> None:
        """Move the gradients of a micro-batch from the parameters into the sums."""
        for n, param in enumerate(self.params):
            grad = param.grad if param.is_initialized else None
            if grad is None:
                continue
            total = self.grads[n]
            if total is None:
                self.grads[n] = grad
            elif n in self._sums:
                total += grad
            else:
                self.grads[n] = force_array(total + grad)
                self._sums.add(n)
            param.cleargrad()

    def is_finite(self) -> bool:
        """Return whether all gradients are finite."""
        return all(bool(chainer.backend.get_array_module(grad).isfinite(grad).all())
                   for grad in self.grads if grad is not None)

    def make_infinite(self) -> None:
        """Make dynamic loss scaling skip this step, as on the rank whose gradients overflowed."""
        self.grads = [None if grad is None else chainer.backend.get_array_module(grad).full_like(
            grad, math.inf) for grad in self.grads]

    def loss(self, value: Array, scale: float) -> Variable:
        """Return a loss whose ``backward()`` sets the gradients of the parameters.

        Args:
            value: The loss.
            scale: The gradient of the loss in the schedule.
        """
        known = [n for n, grad in enumerate(self.grads) if grad is not None]
        if not known:
            return chainer.Variable(value)
        node = _Loss(value, [self.grads[n] for n in known], scale)
        loss, = node.apply([self.params[n] for n in known])
        return loss


class _Loss(Node):
    """The loss as a function of the parameters."""

    def __init__(self, value: Array, grads: Sequence[Array | None], scale: float) -> None:
        super().__init__()
        self._value, self._grads, self._scale = value, grads, scale

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        return self._value,

    def backward(self, indexes: Indexes, gys: Gradients) -> Gradients:
        gy, = gys
        assert gy is not None
        ratio = float(gy.array) / self._scale
        return tuple(
            chainer.as_variable(
                grad if ratio == 1 else force_array(grad * grad.dtype.type(ratio)))
            for grad in map(self._grads.__getitem__, indexes) if grad is not None)


def loss_scale(params: Sequence[Parameter]) -> float | None:
    """Return the loss scale of the last ``backward()``, or ``None`` if it had none."""
    scales = map(gradient_memory.last_scale, params)
    return next((float(scale) for scale in scales if scale), None)
