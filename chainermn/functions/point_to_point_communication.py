"""Differentiable send and recv. The gradient is sent in the opposite direction."""
from __future__ import annotations

import warnings
from collections.abc import Sequence

import chainer
import numpy as np

from chainermn._operations.arguments import is_integer
from chainermn._types import Array, Variable, VariableOrArray, Variables
from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.functions._node import Communication, Gradients, Indexes, are_arrays, placeholder


class _PointToPoint(Communication):
    """A function node with a communicator and a peer."""

    def __init__(self, comm: CommunicatorBase, peer_rank: int, peer_tag: int) -> None:
        super().__init__()
        self.comm = as_communicator(comm, type(self).__name__.lower())
        self.peer_rank = peer_rank
        self.peer_tag = peer_tag


class Send(_PointToPoint):
    """Sends its inputs to a rank. The output is empty and connects backward to the inputs.

    If no input needs a gradient, the receiver sends none.
    """

    def apply(self, inputs: Sequence[VariableOrArray]) -> tuple[Variable, ...]:
        self._needs_gradient = chainer.config.enable_backprop and _any_requires_grad(inputs)
        if not are_arrays(inputs):
            # The receiver also raises the error.
            self.comm._chainermn_channel.send_activation(
                inputs[0] if len(inputs) == 1 else inputs, self.peer_rank, self.peer_tag,
                self._needs_gradient)
        return super().apply(inputs)

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        xp = chainer.backend.get_array_module(*inputs)
        self._activation = self.comm._chainermn_channel.send_activation(
            inputs[0] if len(inputs) == 1 else inputs, self.peer_rank, self.peer_tag,
            self._needs_gradient)
        return xp.empty(0, np.float32),

    def backward(self, indexes: Indexes, gys: Gradients) -> Gradients:
        gxs = self.comm._chainermn_channel.recv_gradient(self._activation)
        return tuple(chainer.as_variable(gx) for gx in _as_tuple(gxs))


class Recv(_PointToPoint):
    """Receives arrays from a rank. The input is a delegate variable or a placeholder."""

    def apply(self, inputs: Sequence[VariableOrArray]) -> tuple[Variable, ...]:
        # Otherwise Chainer would not run backward, and the sender would wait for the gradient.
        return super().apply(inputs if _any_requires_grad(inputs) else (placeholder(),))

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        self._delegate = inputs[0]
        received, self._activation = self.comm._chainermn_channel.recv_activation(
            self.peer_rank, self.peer_tag)
        self.is_tuple = isinstance(received, tuple)
        ys = _as_tuple(received)
        self._described = [(y.shape, y.dtype) for y in ys]
        self._xp = chainer.backend.get_array_module(*ys)
        return ys

    def backward(self, indexes: Indexes, gys: Gradients) -> Gradients:
        if self._activation.needs_gradient:
            arrays = tuple(self._xp.zeros(shape, dtype) if gy is None else gy.array
                           for gy, (shape, dtype) in zip(gys, self._described, strict=True))
            self.comm._chainermn_channel.send_gradient(
                arrays if self.is_tuple else arrays[0], self._activation)
        # Return zeros instead of None, so that backward continues to the node of the delegate
        # variable.
        xp = chainer.backend.get_array_module(self._delegate)
        return chainer.as_variable(xp.zeros_like(self._delegate)),


def send(x: VariableOrArray | Sequence[VariableOrArray], communicator: CommunicatorBase,
         rank: int, tag: int = 0) -> chainer.Variable:
    """Send a Variable, differentiably. Rank ``rank`` calls :func:`recv`.

    Args:
        x: Variable, or tuple or list of Variables, of any shape and floating-point dtype.
        communicator: ChainerMN communicator.
        rank: Rank of the receiver; not this rank.
        tag: Number from 0 to 32767. The receiver must pass the same tag.

    Returns:
        The *delegate variable*: an empty Variable that is connected to ``x``. Its backward
        receives the gradient of ``x`` from the receiver. Call ``backward()`` on it, or connect it
        to a later computation with :func:`recv` or :func:`pseudo_connect`. If nothing in ``x``
        needs a gradient (an array, or a Variable with ``requires_grad=False``), no gradient is
        sent, whether or not the ranks run backward.

    Raises:
        ValueError: If ``rank`` is this rank; or if one rank sends data while the other expects a
            gradient, because one of them does not run backward or runs it in a different order.
            If the ranks deadlock, the job is aborted with a report that shows their calls.

    Example:
        >>> x = chainer.Variable(np.ones(2, np.float32))
        >>> if comm.rank == 0:
        ...     chainermn.functions.send(x, comm, rank=1).backward()
        ... else:
        ...     F.sum(3 * chainermn.functions.recv(comm, rank=0)).backward()
        >>> x.grad
        array([3., 3.], dtype=float32)
    """
    communicator = as_communicator(
        communicator, 'chainermn.functions.send(x, communicator, rank)')
    _check_rank(communicator, rank, 'send')
    xs = tuple(x) if isinstance(x, (tuple, list)) else (x,)
    if not xs:
        raise ValueError('chainermn.functions.send: expected at least one Variable, got none')
    delegate, = Send(communicator, rank, tag).apply(xs)
    delegate.name = 'delegate_variable'
    return delegate


def recv(communicator: CommunicatorBase, rank: int,
         delegate_variable: chainer.Variable | None = None, tag: int = 0,
         force_tuple: bool = False, *, device: object = None) -> Variables:
    """Receive a Variable, differentiably. Rank ``rank`` calls :func:`send`.

    Args:
        communicator: ChainerMN communicator.
        rank: Rank of the sender; not this rank.
        delegate_variable: The result of an earlier :func:`send` on this rank, or another
            Variable. Backward continues from here to this Variable; without it, backward ends
            here.
        tag: The tag of the sender.
        force_tuple: Whether to return a tuple even for a single Variable.
        device: Ignored. Accepted for compatibility with ChainerMN 1.0 to 1.2.

    Returns:
        A Variable with the sender's dtype, shape and values, or a tuple if several were sent.
        Backward sends its gradient to the sender, if the sender needs it.

    Raises:
        ValueError: Same as for :func:`send`.
        TypeError: If ``delegate_variable`` is not a Variable, for example because the tag was
            passed in its place.

    Example:
        >>> if comm.rank == 0:
        ...     print(chainermn.functions.recv(comm, rank=1))
        ... else:
        ...     delegate = chainermn.functions.send(np.ones(2, np.float32), comm, rank=0)
        variable([1. 1.])
    """
    if device is not None:
        warnings.warn('recv ignores device: arrays sent from a device arrive on the current device',
                      DeprecationWarning, stacklevel=2)
    communicator = as_communicator(communicator, 'chainermn.functions.recv(communicator, rank)')
    if delegate_variable is None:
        delegate_variable = placeholder()
    elif not are_arrays((delegate_variable,)):
        advice = (f'. Pass the tag by keyword: tag={delegate_variable}.'
                  if isinstance(delegate_variable, int) else '')
        raise TypeError('chainermn.functions.recv: delegate_variable must be a Variable, not '
                        f'{delegate_variable!r}{advice}')
    _check_rank(communicator, rank, 'recv')
    node = Recv(communicator, rank, tag)
    ys = node.apply((delegate_variable,))
    return ys if node.is_tuple or force_tuple else ys[0]


def _check_rank(communicator: CommunicatorBase, rank: int, function: str) -> None:
    """Check the rank. The communicator would check it, but call it dest or source."""
    size = communicator.size
    if not is_integer(rank):
        raise TypeError(f'chainermn.functions.{function}: rank must be an integer, not {rank!r}')
    if function == 'recv' and rank < 0:
        return  # MPI.ANY_SOURCE, or the communicator raises an error
    if not 0 <= rank < size:
        raise ValueError(
            f'chainermn.functions.{function}: rank must be from 0 to {size - 1}, not {rank}')
    if rank == communicator.rank:
        raise ValueError(f'chainermn.functions.{function}: rank must not be this rank '
                         f'({rank})')


def _as_tuple(x: Array | tuple[Array, ...]) -> tuple[Array, ...]:
    return x if isinstance(x, tuple) else (x,)


def _any_requires_grad(inputs: Sequence[VariableOrArray]) -> bool:
    return any(getattr(x, 'requires_grad', False) for x in inputs)
