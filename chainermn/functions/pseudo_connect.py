"""Connects Variables to earlier communication, so that backward includes it."""
from __future__ import annotations

import chainer

from chainermn._types import Array
from chainermn.functions._node import Gradients, Indexes, Node


class PseudoConnect(Node):
    """Returns all inputs except the first. The gradient of the first input is zero."""

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        delegate, *actual = inputs
        self._delegate_shape = delegate.shape
        self._delegate_dtype = delegate.dtype
        self._xp = chainer.backend.get_array_module(delegate)
        # If an array is both input and output, Chainer treats it as changed in place.
        return tuple(x.view() for x in actual)

    def backward(self, indexes: Indexes, gys: Gradients) -> Gradients:
        zeros = self._xp.zeros(self._delegate_shape, self._delegate_dtype)
        return (chainer.as_variable(zeros), *gys)


def pseudo_connect(delegate_variable: chainer.Variable | None, *actual_variables: chainer.Variable
                   ) -> tuple[chainer.Variable, ...]:
    """Return ``actual_variables``, connected to ``delegate_variable`` in the graph.

    If a model is split over several ranks, the graph on each rank consists of separate parts: one
    part ends with a send, the next part starts with a receive. Backward from the output of the last
    part would not reach the parts before it. Therefore, ``send`` returns an empty *delegate
    variable*. This function returns Variables that have the values of ``actual_variables`` and
    also run the backward pass of the delegate variable.

    Args:
        delegate_variable: The result of an earlier ``send`` or ``pseudo_connect``. With ``None``,
            ``actual_variables`` are returned unchanged.
        actual_variables: Variables of any shape.

    Returns:
        A tuple of Variables with the values and the gradients of ``actual_variables``.

    Example:
        >>> x = chainer.Variable(np.ones(2, np.float32))
        >>> if comm.rank == 0:
        ...     delegate = chainermn.functions.send(x, comm, rank=1)
        ...     loss, = chainermn.functions.pseudo_connect(delegate, F.sum(5 * x))
        ... else:
        ...     loss = F.sum(3 * chainermn.functions.recv(comm, rank=0))
        >>> loss.backward()
        >>> x.grad  # of the losses of both ranks
        array([8., 8.], dtype=float32)
    """
    if delegate_variable is None:
        return actual_variables
    return PseudoConnect().apply((delegate_variable, *actual_variables))
