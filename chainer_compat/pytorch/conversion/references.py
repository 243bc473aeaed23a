"""The parts of a recorded run: functions, and the origins of their inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import chainer
from chainer import FunctionNode

from chainer_compat.pytorch.conversion.tracked_array import Array


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """An example input: the index of the argument, then indexes in its lists, tuples or dicts."""

    path: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """One output of a function."""

    call: TracedCall
    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Detached:
    """A value without its gradient: ``variable.array``, ``unchain`` or ``no_backprop_mode``."""

    value: Reference


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """An array that no function computed: a parameter, a persistent value or a constant."""

    array: Array


#: The origin of a value.
Reference = Input | Output | Detached | Leaf


class NumpyFunction:
    """A NumPy function, with its arguments."""

    def __init__(self, name: str, args: Any, kwargs: Any) -> None:
        self.name, self.args, self.kwargs = name, args, kwargs
        self.drawn: Array | None = None  # the random numbers, if the function draws them


class TracedCall:
    """A function of the run, with its inputs and outputs."""

    def __init__(self, function: Any, inputs: list[Reference], place: str) -> None:
        self.function, self.inputs, self.place = function, inputs, place
        self.train = bool(chainer.config.train)
        self.node: FunctionNode | None = None
        self.is_given = False  # whether its random numbers were passed to it
        self.in_arrays: list[Array] = []
        self.outputs: list[Array] = []

    @property
    def name(self) -> str:
        """The class of the function below ``chainer.functions``, or ``numpy.`` and a name."""
        if isinstance(self.function, NumpyFunction):
            return f'numpy.{self.function.name}'
        cls = type(self.function)
        return f'{cls.__module__}.{cls.__qualname__}'.removeprefix('chainer.functions.')

    @property
    def label(self) -> str:
        """The function, link and line, for messages."""
        return f'{self.name.rsplit(".", 1)[-1]} ({self.place})'


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return nested tuples, lists and dicts with a function applied to their elements."""
    if isinstance(value, dict):
        return {key: mapped(each, function) for key, each in value.items()}
    if isinstance(value, tuple | list):
        made = tuple if isinstance(value, tuple) else list  # fx has no named tuples
        return made(mapped(each, function) for each in value)
    return function(value)


def flattened(value: Any) -> list[Any]:
    """Return the elements of nested tuples, lists and dicts."""
    elements: list[Any] = []
    mapped(value, elements.append)
    return elements


def identity(array: Array) -> Any:
    """Return a key that is the same for all arrays that are the same view of the same memory."""
    interface = array.__array_interface__
    return interface['data'][0], array.shape, array.strides, array.dtype.str
