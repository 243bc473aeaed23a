"""A Chainer function, as seen by its expression."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from chainer_compat.pytorch.conversion.references import Leaf, TracedCall
from chainer_compat.pytorch.conversion.tracked_array import Array, plain


class GraphBuilder(Protocol):
    """The builder of the graph: ``module.Builder``."""

    train: bool
    with_gradients: bool
    mode: Any
    inputs: dict[str, Any]
    tracer: Any

    def merged(self, first: Any, second: Any) -> Any:
        """Return an attribute as a value of the graph."""

    def constant(self, array: Any) -> Any:
        """Return an array as a value of the graph."""

    def is_parameter(self, array: Array) -> bool:
        """Return whether an array belongs to a parameter."""


class FunctionView:
    """The attributes of a function in two runs, as values of the graph."""

    def __init__(self, builder: GraphBuilder, first: TracedCall, second: TracedCall) -> None:
        self._builder, self._first, self._second = builder, first, second

    def __getattr__(self, name: str) -> Any:
        first = getattr(self._first.function, name)
        return self._builder.merged(first, getattr(self._second.function, name))

    @property
    def in_shapes(self) -> tuple[tuple[Any, ...], ...]:
        """The shapes of the inputs."""
        return self._builder.merged(*(tuple(x.shape for x in call.in_arrays)
                                      for call in (self._first, self._second)))

    @property
    def out_shapes(self) -> tuple[tuple[Any, ...], ...]:
        """The shapes of the outputs."""
        return self._builder.merged(*(tuple(y.shape for y in call.outputs)
                                      for call in (self._first, self._second)))

    @property
    def in_dtypes(self) -> list[np.dtype[Any]]:
        """The dtypes of the inputs."""
        return [x.dtype for x in self._first.in_arrays]

    @property
    def out_dtypes(self) -> list[np.dtype[Any]]:
        """The dtypes of the outputs."""
        return [y.dtype for y in self._first.outputs]

    @property
    def arguments(self) -> Any:
        """The arguments of a NumPy function."""
        return plain(self._first.function.args)

    @property
    def training(self) -> Any:
        """The mode of the module, or of this function if the model chooses it."""
        is_mode = self._first.train and self._builder.train
        return self._builder.mode if is_mode else self._first.train

    @property
    def is_given(self) -> bool:
        """Whether user code passed the random numbers to this function."""
        return self._first.is_given

    @property
    def with_gradients(self) -> bool:
        """Whether gradients must match Chainer's, even where several values are equal."""
        return self._builder.with_gradients

    def sizes(self, index: int) -> tuple[int, int]:
        """Return the lengths of an input in both runs."""
        return len(self._first.in_arrays[index]), len(self._second.in_arrays[index])

    def known(self, index: int) -> Array | None:
        """Return an input if it is a constant, otherwise ``None``."""
        reference = self._first.inputs[index]
        if isinstance(reference, Leaf) and not self._builder.is_parameter(reference.array):
            return reference.array
        return None

    def raw(self, name: str) -> Any:
        """Return the original value of an attribute that does not depend on the inputs."""
        return getattr(self._first.function, name)

    def is_contiguous(self, index: int) -> bool:
        """Return whether an input is C-contiguous."""
        return bool(self._first.in_arrays[index].flags.c_contiguous)

    def constant(self, array: Array) -> Any:
        """Return an array as a value of the graph."""
        return self._builder.constant(array)

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Add a call to a function that takes no tensors, such as one that draws random numbers."""
        first = next(iter(self._builder.inputs.values()), None)
        if first is not None:
            options['device'] = first.device
        return self._builder.tracer.create_proxy('call_function', function, args, options)


