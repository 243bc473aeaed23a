"""Expressions for runs, which also store what Chainer's own ``backward`` reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from chainer import FunctionNode

from chainer_compat.pytorch.tensors.arrays import Expression, check_floats
from chainer_compat.pytorch.unsupported import Unsupported


class Retained(NamedTuple):
    """The arrays that ``backward`` of a Chainer function reads, besides options of the function."""

    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    #: Sets the attributes that ``forward`` sets, given the function and its input tensors.
    attributes: Callable[..., None] | None = None
    #: Whether the expression reads ``f.in_shapes``.
    shapes: bool = False


NOTHING = Retained()
X = Retained((0,))
XX = Retained((0, 1))
Y = Retained((), (0,))


class Called:
    """A Chainer function and its inputs, as seen by its expression."""

    __slots__ = '_f', '_inputs'

    def __init__(self, f: FunctionNode, inputs: tuple[torch.Tensor, ...]) -> None:
        self._f, self._inputs = f, inputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._f, name)

    @property
    def in_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the inputs."""
        return [tuple(x.shape) for x in self._inputs]


def retaining(expression: Expression, retained: Retained) -> Expression:
    """Return an expression that also stores what ``forward`` of its function stores.

    It only supports floating-point tensors that are not empty.
    """
    inputs, outputs, attributes, shapes = retained

    def run(f: FunctionNode, *xs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        check_floats(*xs)
        for x in xs:
            if not x.numel():
                raise Unsupported
        try:
            y = expression(Called(f, xs) if shapes else f, *xs)
        except NotImplementedError as error:
            raise Unsupported from error
        if inputs:
            f.retain_inputs(inputs)
        if outputs:
            f.retain_outputs(outputs)
        if attributes is not None:
            attributes(f, *xs)
        return y

    return run
