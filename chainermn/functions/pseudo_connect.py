"""Connects Variables to communication, so that backward includes it."""
from __future__ import annotations

import chainer

from chainermn._types import Array
from chainermn.functions._node import Gradients, Indexes, Node


class PseudoConnect(Node):
    """Returns all inputs except the first, whose gradient is zero."""

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

    The parts of a model on several ranks are not connected in the graph of one rank: one part ends
    with a send, another starts with a receive. Backward from the output of the last part would
    miss the others. So ``send`` returns an empty *delegate variable*, and this function returns
    Variables with the values of ``actual_variables``, whose backward also runs the backward of the
    delegate variable.

    Args:
        delegate_variable: The result of an earlier ``send`` or ``pseudo_connect``; ``None``
            returns ``actual_variables`` as they are.
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
