"""Ties a Variable to a communication that has to be part of its backward."""
from __future__ import annotations

from typing import Any

import chainer

from chainermn.functions._node import Node


class PseudoConnect(Node):
    """Passes on all inputs but the first, to which it gives a gradient of zeros."""

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        delegate, *actual = inputs
        self._delegate_shape = delegate.shape
        self._delegate_dtype = delegate.dtype
        self._xp = chainer.backend.get_array_module(delegate)
        # Chainer takes an array that is input and output at once for an in-place change.
        return tuple(x.view() for x in actual)

    def backward(self, indexes: Any, gys: tuple[Any, ...]) -> tuple[Any, ...]:
        zeros = self._xp.zeros(self._delegate_shape, self._delegate_dtype)
        return (chainer.as_variable(zeros), *gys)


def pseudo_connect(delegate_variable: chainer.Variable | None, *actual_variables: chainer.Variable
                   ) -> tuple[chainer.Variable, ...]:
    """Returns ``actual_variables`` connected to ``delegate_variable`` in the graph.

    A model on several ranks can consist of parts that are not connected in the graph of one rank:
    a part ends where it sends, and another begins where it receives.  Backward from the output
    of the last part would miss the others.  ``send`` therefore returns an empty *delegate
    variable*, and this function makes variables with the values of ``actual_variables``, from which
    backward also leads to the delegate:

    >>> delegate = chainermn.functions.send(h, comm, rank=1)    # doctest: +SKIP
    >>> y, = chainermn.functions.pseudo_connect(delegate, y)    # doctest: +SKIP
    >>> loss(y).backward()                                      # doctest: +SKIP

    Args:
        delegate_variable: What an earlier ``send`` or ``pseudo_connect`` returned; ``None`` if
            there is nothing to connect to yet.
        actual_variables: The Variables whose values are passed on.

    Returns:
        A tuple of Variables with the values and the gradients of ``actual_variables``.
    """
    if delegate_variable is None:
        return actual_variables
    return PseudoConnect().apply((delegate_variable, *actual_variables))
