"""Differentiable collectives. The backward pass of each is another collective.

=================  =============================================================
forward            backward
=================  =============================================================
allgather          reduce_scatter: each rank gets the sum for its own array
reduce_scatter     allgather
alltoall           alltoall
allreduce          allreduce
bcast              the gradients of all ranks are summed on the root
gather             scatter
scatter            gather
=================  =============================================================

An output that the loss does not use gets a gradient of zeros, so backward also communicates for
it. If one rank runs backward, all ranks must. Sums of float16 gradients are computed in float32.
"""
from __future__ import annotations

import warnings
from collections.abc import Sequence

import chainer
import numpy as np

from chainermn._operations.on_all_ranks import raise_together
from chainermn._types import Array, ArrayModule, Variable, VariableOrArray
from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.functions._node import Communication, Gradients, Indexes, are_arrays, placeholder


class _Collective(Communication):
    """A function node with a communicator. Replaces missing gradients with zeros."""

    def __init__(self, comm: CommunicatorBase, root: int = 0) -> None:
        super().__init__()
        self.comm = as_communicator(comm, type(self).__name__)
        self.root = root

    def apply(self, inputs: Sequence[VariableOrArray]) -> tuple[Variable, ...]:
        if not are_arrays(inputs):  # Chainer would raise on this rank only
            found = ', '.join(sorted({type(x).__name__ for x in inputs}))
            self.comm.refuse(type(self).__name__.lower(), TypeError(
                f'expected Variables or arrays, but got {found}'))
        return super().apply(inputs)

    def _zeros_for_missing(self, gys: Gradients) -> tuple[Variable, ...]:
        """Replace gradients that are ``None`` with zeros that have the shapes of the outputs."""
        return tuple(
            _zeros(self._xp, shape, dtype) if gy is None else gy
            for gy, (shape, dtype) in zip(gys, self._described, strict=True))

    def _outputs(self, ys: tuple[Array, ...]) -> tuple[Array, ...]:
        """Record the shapes and dtypes of the outputs for their gradients. Return the outputs."""
        self._xp = chainer.backend.get_array_module(*ys)
        self._described = [(y.shape, y.dtype) for y in ys]
        return ys


class AllGather(_Collective):
    """Gives every rank the arrays of all ranks."""

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        return self._outputs(self.comm.allgather(inputs[0]))

    def backward(self, indexes: Indexes, gys: Gradients) -> Gradients:
        return ReduceScatter(self.comm).apply(self._zeros_for_missing(gys))


class ReduceScatter(_Collective):
    """Gives rank ``i`` the sum of the ``i``-th inputs of all ranks."""

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        return self._outputs((self.comm.reduce_scatter(inputs),))

    def backward(self, indexes: Indexes, gys: Gradients) -> Gradients:
        return AllGather(self.comm).apply(self._zeros_for_missing(gys))


class AllToAll(_Collective):
    """Sends one array to each rank and gets one from each."""

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        return self._outputs(self.comm.alltoall(inputs))

    def backward(self, indexes: Indexes, gys: Gradients) -> Gradients:
        return AllToAll(self.comm).apply(self._zeros_for_missing(gys))


class AllReduce(_Collective):
    """Gives every rank the sum of the arrays of all ranks."""

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        return self._outputs((self.comm.allreduce(inputs[0]),))

    def backward(self, indexes: Indexes, gys: Gradients) -> Gradients:
        return AllReduce(self.comm).apply(self._zeros_for_missing(gys))


class Bcast(_Collective):
    """Gives every rank the array of the root. On the other ranks, the input is a placeholder."""

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        is_root = self.comm.rank == self.root
        y = self.comm.bcast(inputs[0] if is_root else None, root=self.root)
        # If an array is both input and output, Chainer treats it as changed in place.
        return self._outputs((y.copy() if is_root else y,))

    def backward(self, indexes: Indexes, gys: Gradients) -> Gradients:
        gxs = _SumOnRoot(self.comm, self.root).apply(self._zeros_for_missing(gys))
        return gxs if self.comm.rank == self.root else (None,)


class _SumOnRoot(_Collective):
    """Gives the root the sum of the arrays of all ranks, and the other ranks an empty array."""

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        y = self.comm.reduce(inputs[0], root=self.root)
        return self._outputs((_empty_like(inputs[0]) if y is None else y,))

    def backward(self, indexes: Indexes, gys: Gradients) -> Gradients:
        return Bcast(self.comm, self.root).apply(self._zeros_for_missing(gys))


class Gather(_Collective):
    """Gives the root the arrays of all ranks, and the other ranks an empty array."""

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        ys = self.comm.gather(inputs[0], self.root)
        return self._outputs((_empty_like(inputs[0]),) if ys is None else ys)

    def backward(self, indexes: Indexes, gys: Gradients) -> Gradients:
        return Scatter(self.comm, self.root).apply(self._zeros_for_missing(gys))


class Scatter(_Collective):
    """Gives each rank one of the root's arrays. On the other ranks, the input is a placeholder."""

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        return self._outputs((self.comm.scatter(
            inputs if self.comm.rank == self.root else None, self.root),))

    def backward(self, indexes: Indexes, gys: Gradients) -> Gradients:
        gxs = Gather(self.comm, self.root).apply(self._zeros_for_missing(gys))
        return gxs if self.comm.rank == self.root else (None,)


def allgather(comm: CommunicatorBase, x: VariableOrArray) -> tuple[chainer.Variable, ...]:
    """Differentiable all-gather. Collective: every rank calls it and runs backward.

    Args:
        comm: ChainerMN communicator.
        x: Variable or array of any shape, with the same dtype on all ranks.

    Returns:
        On every rank, a tuple with the Variables of all ranks, in rank order.

    Example:
        >>> x = chainer.Variable(np.full(2, comm.rank, np.float32))
        >>> ys = chainermn.functions.allgather(comm, x)
        >>> F.sum(F.stack(ys)).backward()
        >>> x.grad  # of the losses of both ranks
        array([2., 2.], dtype=float32)
    """
    return AllGather(_checked_comm(comm, 'allgather(comm, x)')).apply((x,))


def reduce_scatter(comm: CommunicatorBase, xs: Sequence[VariableOrArray]) -> chainer.Variable:
    """Differentiable reduce-scatter. Collective: every rank calls it and runs backward.

    Args:
        comm: ChainerMN communicator.
        xs: One Variable or array for each rank, all of the same dtype; or one Variable with these
            as rows. ``xs[i]`` has the same shape on all ranks.

    Returns:
        On rank ``i``, the sum of ``xs[i]`` over all ranks.

    Raises:
        ValueError: On all ranks, if ``xs`` does not have one element for each rank.

    Example:
        >>> xs = [np.full(2, comm.rank + i, np.float32) for i in range(comm.size)]
        >>> chainermn.functions.reduce_scatter(comm, xs)
        variable([1., 1.])
    """
    comm = _checked_comm(comm, 'reduce_scatter(comm, xs)')
    return ReduceScatter(comm).apply(_one_for_each_rank(comm, xs, 'reduce_scatter'))[0]


def alltoall(comm: CommunicatorBase, xs: Sequence[VariableOrArray]) -> tuple[chainer.Variable, ...]:
    """Differentiable all-to-all. Collective: every rank calls it and runs backward.

    Args:
        comm: ChainerMN communicator.
        xs: One Variable or array for each rank, of any shape, all of the same dtype; or one
            Variable with these as rows.

    Returns:
        On rank ``i``, a tuple with ``xs[i]`` of all ranks, in rank order.

    Raises:
        ValueError: On all ranks, if ``xs`` does not have one element for each rank.

    Example:
        >>> xs = [np.array([comm.rank, i], np.float32) for i in range(comm.size)]
        >>> chainermn.functions.alltoall(comm, xs)
        (variable([0., 0.]), variable([1., 0.]))
    """
    comm = _checked_comm(comm, 'alltoall(comm, xs)')
    return AllToAll(comm).apply(_one_for_each_rank(comm, xs, 'alltoall'))


def all_to_all(comm: CommunicatorBase, xs: Sequence[VariableOrArray], device: int = -1
               ) -> tuple[chainer.Variable, ...]:
    """Call ``alltoall``, whose name was ``all_to_all`` in ChainerMN 1.0 to 1.2.

    Collective: every rank calls it.

    Args:
        comm: ChainerMN communicator.
        xs: Same as for :func:`alltoall`.
        device: Ignored.

    Returns:
        Same as for :func:`alltoall`.
    """
    warnings.warn('chainermn.functions.all_to_all is deprecated; use alltoall, without device',
                  DeprecationWarning, stacklevel=2)
    return alltoall(comm, xs)


def allreduce(comm: CommunicatorBase, x: VariableOrArray) -> chainer.Variable:
    """Differentiable all-reduce (sum). Collective: every rank calls it and runs backward.

    If every rank computes its own loss from the sum, ``x`` gets the gradient of the sum of all
    losses.

    Args:
        comm: ChainerMN communicator.
        x: Variable or array, with the same dtype and shape on all ranks.

    Returns:
        On every rank, the sum over all ranks.

    Example:
        >>> x = chainer.Variable(np.full(2, comm.rank + 1, np.float32))
        >>> y = chainermn.functions.allreduce(comm, x)
        >>> y
        variable([3., 3.])
        >>> F.sum(y).backward()
    """
    return AllReduce(_checked_comm(comm, 'allreduce(comm, x)')).apply((x,))[0]


def bcast(comm: CommunicatorBase, x: VariableOrArray | None, root: int = 0) -> chainer.Variable:
    """Differentiable broadcast. Collective: every rank calls it and runs backward.

    Args:
        comm: ChainerMN communicator.
        x: On the root, a Variable or array. Ignored on the other ranks.
        root: The rank whose array is sent; the same on all ranks.

    Returns:
        On every rank, a Variable with the root's array.

    Example:
        >>> x = np.ones(2, np.float32) if comm.rank == 0 else None
        >>> chainermn.functions.bcast(comm, x)
        variable([1., 1.])
    """
    comm = _checked_comm(comm, 'bcast(comm, x)')
    return Bcast(comm, root).apply((x if comm.rank == root else placeholder(),))[0]


def gather(comm: CommunicatorBase, x: VariableOrArray, root: int = 0
           ) -> chainer.Variable | tuple[chainer.Variable, ...]:
    """Differentiable gather. Collective: every rank calls it and runs backward.

    Args:
        comm: ChainerMN communicator.
        x: Variable or array of any shape, with the same dtype on all ranks.
        root: The rank that gets the arrays; the same on all ranks.

    Returns:
        On the root, a tuple with the Variables of all ranks, in rank order. On the other ranks, one
        Variable of shape ``(0,)``, on which to call ``backward()``.

    Example:
        >>> x = np.full(2, comm.rank, np.float32)
        >>> chainermn.functions.gather(comm, x)
        (variable([0., 0.]), variable([1., 1.]))
    """
    comm = _checked_comm(comm, 'gather(comm, x)')
    ys = Gather(comm, root).apply((x,))
    return ys if comm.rank == root else ys[0]


def scatter(comm: CommunicatorBase, xs: Sequence[VariableOrArray] | None, root: int = 0
            ) -> chainer.Variable:
    """Differentiable scatter. Collective: every rank calls it and runs backward.

    Args:
        comm: ChainerMN communicator.
        xs: On the root, one Variable or array for each rank, of any shape, all of the same dtype;
            or one Variable with these as rows. Ignored on the other ranks.
        root: The rank whose arrays are sent; the same on all ranks.

    Returns:
        On rank ``i``, ``xs[i]`` of the root.

    Raises:
        ValueError: On all ranks, if ``xs`` does not have one element for each rank.

    Example:
        >>> xs = [np.zeros(2, np.float32), np.ones(3, np.float32)] if comm.rank == 0 else None
        >>> chainermn.functions.scatter(comm, xs)
        variable([0., 0.])
    """
    comm = _checked_comm(comm, 'scatter(comm, xs)')
    inputs = _one_for_each_rank(comm, xs, 'scatter', comm.rank == root)
    return Scatter(comm, root).apply(inputs)[0]


def _checked_comm(comm: CommunicatorBase, call: str) -> CommunicatorBase:
    return as_communicator(comm, f'chainermn.functions.{call}')


def _one_for_each_rank(comm: CommunicatorBase, xs: Sequence[VariableOrArray] | None,
                       operation: str, is_sender: bool = True) -> tuple[VariableOrArray, ...]:
    """Check and return the inputs of a rank that sends; return a placeholder on other ranks."""
    with raise_together(comm, operation):
        return _checked(xs, comm.size) if is_sender else (placeholder(),)


def _checked(xs: Sequence[VariableOrArray] | None, size: int) -> tuple[VariableOrArray, ...]:
    if xs is not None and getattr(xs, 'ndim', 0) > 0:  # a Variable or an array
        xs = [xs[i] for i in range(len(xs))]
    if not isinstance(xs, (tuple, list)) or len(xs) != size:
        got = f'{len(xs)} elements' if isinstance(xs, (tuple, list)) else type(xs).__name__
        raise ValueError(
            f'expected a tuple or list with one Variable for each of the {size} ranks, got {got}')
    return tuple(xs)


def _empty_like(x: Array) -> Array:
    return chainer.backend.get_array_module(x).empty(0, x.dtype)


def _zeros(xp: ArrayModule, shape: tuple[int, ...], dtype: np.dtype) -> chainer.Variable:
    return chainer.Variable(xp.zeros(shape, dtype), requires_grad=False)
