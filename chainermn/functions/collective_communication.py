"""Differentiable collectives; the gradient of each is another one of them.

=================  =============================================================
forward            backward
=================  =============================================================
allgather          reduce_scatter: each rank sums the gradients for its array
reduce_scatter     allgather
alltoall           alltoall
allreduce          allreduce
bcast              the gradients of all ranks are summed on the root
gather             scatter
scatter            gather
=================  =============================================================

A gradient is sent for every output, zeros for one that the loss does not use; so if backward runs
on one rank it has to run on all.  Sums of float16 gradients are computed in float32.
"""
from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import chainer

from chainermn.functions._node import Node, placeholder


class _Collective(Node):
    """A function node on a communicator that knows how to fill in missing gradients."""

    def __init__(self, comm: Any, root: int = 0) -> None:
        super().__init__()
        self.comm = comm
        self.root = root

    def _zeros_for_missing(self, gys: Sequence[Any]) -> tuple[Any, ...]:
        """Replaces gradients that are ``None`` by zeros shaped as the outputs."""
        return tuple(
            _zeros(self._xp, shape, dtype) if gy is None else gy
            for gy, (shape, dtype) in zip(gys, self._described, strict=True))

    def _outputs(self, ys: tuple[Any, ...]) -> tuple[Any, ...]:
        """Remembers what the gradients of the outputs look like."""
        self._xp = chainer.backend.get_array_module(*ys)
        self._described = [(y.shape, y.dtype) for y in ys]
        return ys


class AllGather(_Collective):
    """Gives every rank the arrays of all ranks."""

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._outputs(self.comm.allgather(inputs[0]))

    def backward(self, indexes: Any, gys: tuple[Any, ...]) -> tuple[Any, ...]:
        return ReduceScatter(self.comm).apply(self._zeros_for_missing(gys))


class ReduceScatter(_Collective):
    """Gives each rank the sum of the arrays that all ranks hold for it."""

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._outputs((self.comm.reduce_scatter(inputs),))

    def backward(self, indexes: Any, gys: tuple[Any, ...]) -> tuple[Any, ...]:
        return AllGather(self.comm).apply(self._zeros_for_missing(gys))


class AllToAll(_Collective):
    """Sends one array to each rank and gets one from each."""

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._outputs(self.comm.alltoall(inputs))

    def backward(self, indexes: Any, gys: tuple[Any, ...]) -> tuple[Any, ...]:
        return AllToAll(self.comm).apply(self._zeros_for_missing(gys))


class AllReduce(_Collective):
    """Gives every rank the sum of the arrays of all ranks."""

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._outputs((self.comm.allreduce(inputs[0]),))

    def backward(self, indexes: Any, gys: tuple[Any, ...]) -> tuple[Any, ...]:
        return AllReduce(self.comm).apply(self._zeros_for_missing(gys))


class Bcast(_Collective):
    """Gives every rank the array of the root; its input on the other ranks is a placeholder."""

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        y = self.comm.bcast(inputs[0], self.root)
        # Chainer takes an array that is input and output at once for an in-place change.
        return self._outputs((y.copy() if self.comm.rank == self.root else y,))

    def backward(self, indexes: Any, gys: tuple[Any, ...]) -> tuple[Any, ...]:
        gxs = _SumOnRoot(self.comm, self.root).apply(self._zeros_for_missing(gys))
        return gxs if self.comm.rank == self.root else (None,)


class _SumOnRoot(_Collective):
    """Gives the root the sum of the arrays of all ranks, and the others an empty array."""

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        y = self.comm.reduce(inputs[0], root=self.root)
        return self._outputs((_empty_like(inputs[0]) if y is None else y,))

    def backward(self, indexes: Any, gys: tuple[Any, ...]) -> tuple[Any, ...]:
        return Bcast(self.comm, self.root).apply(self._zeros_for_missing(gys))


class Gather(_Collective):
    """Gives the root the arrays of all ranks, and the others an empty array."""

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        ys = self.comm.gather(inputs[0], self.root)
        return self._outputs((_empty_like(inputs[0]),) if ys is None else ys)

    def backward(self, indexes: Any, gys: tuple[Any, ...]) -> tuple[Any, ...]:
        return Scatter(self.comm, self.root).apply(self._zeros_for_missing(gys))


class Scatter(_Collective):
    """Gives each rank one array of the root; its input on the other ranks is a placeholder."""

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._outputs((self.comm.scatter(inputs, self.root),))

    def backward(self, indexes: Any, gys: tuple[Any, ...]) -> tuple[Any, ...]:
        gxs = Gather(self.comm, self.root).apply(self._zeros_for_missing(gys))
        return gxs if self.comm.rank == self.root else (None,)


def allgather(comm: Any, x: Any) -> tuple[chainer.Variable, ...]:
    """Differentiable all-gather.  Collective: every rank calls it, and runs backward.

    Args:
        comm: ChainerMN communicator.
        x: Variable or array; shapes may differ between the ranks, dtypes may not.

    Returns:
        On every rank a tuple with the Variable of each rank, by rank.
    """
    return AllGather(comm).apply((x,))


def reduce_scatter(comm: Any, xs: Sequence[Any]) -> chainer.Variable:
    """Differentiable reduce-scatter.  Collective: every rank calls it, and runs backward.

    Args:
        comm: ChainerMN communicator.
        xs: One Variable or array for each rank; what all ranks hold for one rank has one shape.

    Returns:
        The sum of what all ranks hold for this rank.
    """
    return ReduceScatter(comm).apply(_one_for_each_rank(comm, xs))[0]


def alltoall(comm: Any, xs: Sequence[Any]) -> tuple[chainer.Variable, ...]:
    """Differentiable all-to-all.  Collective: every rank calls it, and runs backward.

    Args:
        comm: ChainerMN communicator.
        xs: One Variable or array for each rank, of one dtype; shapes are free.  Or one Variable,
            whose rows they are.

    Returns:
        A tuple with the Variable that each rank meant for this rank, by rank.

    Raises:
        ValueError: If ``xs`` has not one element for each rank.
    """
    return AllToAll(comm).apply(_one_for_each_rank(comm, xs))


def all_to_all(comm: Any, xs: Sequence[Any], device: int = -1) -> tuple[chainer.Variable, ...]:
    """The name of :func:`alltoall` in ChainerMN 1.0 to 1.2; ``device`` is ignored."""
    warnings.warn('chainermn.functions.all_to_all is called alltoall today, without device',
                  DeprecationWarning, stacklevel=2)
    return alltoall(comm, xs)


def allreduce(comm: Any, x: Any) -> chainer.Variable:
    """Differentiable all-reduce (sum).  Collective: every rank calls it, and runs backward.

    If every rank computes its own loss from the sum, the gradient of ``x`` is that of the sum of
    the losses of all ranks.

    Args:
        comm: ChainerMN communicator.
        x: Variable or array; the same dtype and shape on all ranks.

    Returns:
        On every rank the sum over all ranks.
    """
    return AllReduce(comm).apply((x,))[0]


def bcast(comm: Any, x: Any, root: int = 0) -> chainer.Variable:
    """Differentiable broadcast.  Collective: every rank calls it, and runs backward.

    Args:
        comm: ChainerMN communicator.
        x: On the root, Variable or array.  Ignored on the other ranks.
        root: The rank whose array is sent.

    Returns:
        On every rank a Variable with the root's array.
    """
    return Bcast(comm, root).apply((x if comm.rank == root else placeholder(),))[0]


def gather(comm: Any, x: Any, root: int = 0) -> Any:
    """Differentiable gather.  Collective: every rank calls it, and runs backward.

    Args:
        comm: ChainerMN communicator.
        x: Variable or array; shapes may differ between the ranks, dtypes may not.
        root: The rank that gets the arrays.

    Returns:
        On the root a tuple with the Variable of each rank, by rank.  Elsewhere one Variable of
        shape ``(0,)``, from which backward runs.
    """
    ys = Gather(comm, root).apply((x,))
    return ys if comm.rank == root else ys[0]


def scatter(comm: Any, xs: Sequence[Any] | None, root: int = 0) -> chainer.Variable:
    """Differentiable scatter.  Collective: every rank calls it, and runs backward.

    Args:
        comm: ChainerMN communicator.
        xs: On the root, one Variable or array for each rank, or one Variable, whose rows they are.
            Ignored on the other ranks.
        root: The rank whose arrays are sent.

    Returns:
        The Variable with the number of this rank.
    """
    inputs = (placeholder(),)
    if comm.rank == root:
        inputs = _one_for_each_rank(comm, xs, 'scatter')
    return Scatter(comm, root).apply(inputs)[0]


def _one_for_each_rank(comm: Any, xs: Any, verb: str = 'alltoall') -> tuple[Any, ...]:
    if getattr(xs, 'ndim', 0):  # a Variable or an array
        xs = [xs[i] for i in range(len(xs))]
    if not isinstance(xs, (tuple, list)) or len(xs) != comm.size:
        got = len(xs) if isinstance(xs, (tuple, list)) else type(xs)
        comm.refuse(verb, ValueError(f'expected a tuple or list of one Variable for each of the '
                                     f'{comm.size} ranks but got {got}'))
    return tuple(xs)


def _empty_like(x: Any) -> Any:
    return chainer.backend.get_array_module(x).empty(0, x.dtype)


def _zeros(xp: Any, shape: tuple[int, ...], dtype: Any) -> chainer.Variable:
    return chainer.Variable(xp.zeros(shape, dtype), requires_grad=False)
