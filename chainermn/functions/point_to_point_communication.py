"""Differentiable send and recv: the gradient takes the way back."""
from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np

from chainermn.functions._node import Node, placeholder


class _PointToPoint(Node):
    """A function node that knows its peer."""

    def __init__(self, comm: Any, peer_rank: int, peer_tag: int) -> None:
        super().__init__()
        self.comm = comm
        self.peer_rank = peer_rank
        self.peer_tag = peer_tag


class Send(_PointToPoint):
    """Sends its inputs to a rank; its output is empty and carries the way back.

    If no input needs a gradient, the receiver is told and sends none.
    """

    def apply(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        self._needs_gradient = chainer.config.enable_backprop and _any_requires_grad(inputs)
        return super().apply(inputs)

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        xp = chainer.backend.get_array_module(*inputs)
        self._activation = self.comm.send_activation(
            inputs[0] if len(inputs) == 1 else inputs, self.peer_rank, self.peer_tag,
            self._needs_gradient)
        return xp.empty(0, np.float32),

    def backward(self, indexes: Any, gys: Any) -> tuple[Any, ...]:
        gxs = self.comm.recv_gradient(self._activation)
        return tuple(chainer.as_variable(gx) for gx in _as_tuple(gxs))


class Recv(_PointToPoint):
    """Receives arrays from a rank; its input is a delegate or a placeholder."""

    def apply(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        # Otherwise Chainer would not run backward, and the sender would wait for the gradient.
        return super().apply(inputs if _any_requires_grad(inputs) else (placeholder(),))

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        self._delegate = inputs[0]
        received, self._activation = self.comm.recv_activation(self.peer_rank, self.peer_tag)
        self.is_tuple = isinstance(received, tuple)
        ys = _as_tuple(received)
        self._described = [(y.shape, y.dtype) for y in ys]
        self._xp = chainer.backend.get_array_module(*ys)
        return ys

    def backward(self, indexes: Any, gys: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._activation.needs_gradient:
            arrays = tuple(self._xp.zeros(shape, dtype) if gy is None else gy.array
                           for gy, (shape, dtype) in zip(gys, self._described, strict=True))
            self.comm.send_gradient(arrays if self.is_tuple else arrays[0], self._activation)
        # Not None: backward would not go on to the node of the delegate.
        xp = chainer.backend.get_array_module(self._delegate)
        return chainer.as_variable(xp.zeros_like(self._delegate)),


def send(x: Any, communicator: Any, rank: int, tag: int = 0) -> chainer.Variable:
    """Differentiable send.  The rank ``rank`` calls :func:`recv`.

    Args:
        x: Variable, or tuple or list of Variables, of any shapes and floating-point dtypes.
        communicator: ChainerMN communicator.
        rank: Rank of the receiver; not this rank.
        tag: Number that the receiver asks for.

    Returns:
        The *delegate variable*, an empty Variable without data, from which backward leads to
        ``x``.  Backward receives the gradient of ``x`` from the receiver.  Call ``backward()`` on
        it, or tie it to what is computed later by :func:`recv` or :func:`pseudo_connect`.  If
        nothing in ``x`` needs a gradient (an array, or a Variable with ``requires_grad=False``),
        no gradient is exchanged, whether or not the ranks run backward.

    Raises:
        ValueError: If ``rank`` is this rank; or if this rank and ``rank`` wait for each other, or
            expect data where a gradient comes or the other way round, since one of them does not
            run backward, or in another order.
    """
    if rank == communicator.rank:
        raise ValueError(f'rank has to be another rank than this one, {rank}')
    xs = tuple(x) if isinstance(x, (tuple, list)) else (x,)
    if not xs:
        raise ValueError('expected at least one Variable to send')
    delegate, = Send(communicator, rank, tag).apply(xs)
    delegate.name = 'delegate_variable'
    return delegate


def recv(communicator: Any, rank: int, delegate_variable: chainer.Variable | None = None,
         tag: int = 0, force_tuple: bool = False, *, device: Any = None) -> Any:
    """Differentiable recv.  The rank ``rank`` calls :func:`send`.

    Args:
        communicator: ChainerMN communicator.
        rank: Rank of the sender; not this rank.
        delegate_variable: What an earlier :func:`send` on this rank returned, or another
            Variable.  With it backward goes on from here to what made it; without it backward
            ends here.
        tag: The number that was sent with it.
        force_tuple: Whether to return a tuple for a single Variable, too.
        device: Ignored; ChainerMN 1.0 to 1.2 had it.

    Returns:
        A Variable with the dtype, shape and values that were sent, or a tuple if several were.
        Backward sends its gradient back, if the sender needs it.

    Raises:
        ValueError: As :func:`send`.
    """
    if device is not None:
        warnings.warn('recv ignores device: what was sent from a device arrives on the current one',
                      DeprecationWarning, stacklevel=2)
    if rank == communicator.rank:
        raise ValueError(f'rank has to be another rank than this one, {rank}')
    if delegate_variable is None:
        delegate_variable = placeholder()
    node = Recv(communicator, rank, tag)
    ys = node.apply((delegate_variable,))
    return ys if node.is_tuple or force_tuple else ys[0]


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def _any_requires_grad(inputs: Sequence[Any]) -> bool:
    return any(getattr(x, 'requires_grad', False) for x in inputs)
