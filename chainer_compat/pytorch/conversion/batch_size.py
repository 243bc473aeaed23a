"""Finds the sizes that depend on the batch size, from two runs with different batch sizes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from chainer import Variable

from chainer_compat.pytorch.conversion.errors import ConversionError
from chainer_compat.pytorch.conversion.references import flattened, mapped
from chainer_compat.pytorch.conversion.tracked_array import Array


class BatchSize:
    """The batch size as a value of the graph, and values computed from it.

    Args:
        value: The batch size.
        sizes: The batch sizes of the two runs.
    """

    def __init__(self, value: Any, sizes: tuple[int, int]) -> None:
        self._value, self._sizes = value, sizes

    def size(self, first: int, second: int) -> Any:
        """Return a size that differs between runs: a multiple of the batch size plus a constant."""
        factor, rest = divmod(second - first, self._sizes[1] - self._sizes[0])
        if rest:
            raise ConversionError(f'its size is {first} for the batch size {self._sizes[0]}, and '
                                  f'{second} for {self._sizes[1]}')
        offset = first - factor * self._sizes[0]
        size = self._value if factor == 1 else self._value * factor
        return size + offset if offset else size

    def number(self, first: float, second: float) -> Any:
        """Return a number that is proportional to the batch size or its inverse, as in means."""
        sizes = self._sizes
        if math.isclose(first * sizes[0], second * sizes[1], rel_tol=1e-6):
            return first * sizes[0] / self._value
        if math.isclose(first / sizes[0], second / sizes[1], rel_tol=1e-6):
            return first / sizes[0] * self._value
        raise ConversionError(f'it depends on the values of the inputs, or on the batch size in a '
                              f'way that is not linear: it is {first} and {second} in two runs')

    def array(self, constant: Callable[[Array], Any], first: Array, second: Array) -> Any:
        """Return a constant that grows with the batch, such as the initial state of an LSTM.

        Args:
            constant: Function that adds an array to the graph.
            first: The array in one run.
            second: The array in the other run.
        """
        shape: list[Any] = list(first.shape)
        one = first
        for axis, (size, other) in enumerate(zip(first.shape, second.shape, strict=True)):
            if size != other:
                one = one.take([0], axis)
                shape[axis] = self.size(size, other)
        for array in first, second:
            if not np.array_equal(np.broadcast_to(one, array.shape), array):
                raise ConversionError('its input is an array that depends on the batch size')
        return constant(one).expand(shape)


def batch_size(inputs: tuple[Any, ...]) -> int | None:
    """Return the length of the first array; ``None`` if there is no such length."""
    arrays = [x for x in flattened(inputs) if _is_array(x)]
    return len(arrays[0]) if arrays and arrays[0].ndim and len(arrays[0]) else None


def other_sizes(size: int) -> list[int]:
    """Return batch sizes to try besides ``size`` and ``size + 1``: small, odd, even and large."""
    return sorted({1, 2, 3, size + 2, max(2 * size + 1, 17)} - {size, size + 1})


def varied(inputs: tuple[Any, ...], batch: int | None, size: int | None, seed: int = 0
           ) -> Iterator[tuple[Any, ...]]:
    """Yield inputs with different values, from very different to similar ones.

    Args:
        inputs: The example inputs.
        batch: The length of the arrays that get a different length.
        size: The different length.
        seed: The seed of the random numbers.
    """
    for kind in 'elements', 'rows', 'values':
        random = np.random.RandomState(seed)
        yield mapped(inputs, functools.partial(
            _varied, batch=batch, size=size, kind=kind, random=random))


def _varied(value: Any, batch: int | None, size: int | None, kind: str, random: Any) -> Any:
    if isinstance(value, Variable):
        return Variable(_varied(value.array, batch, size, kind, random),
                        requires_grad=value.requires_grad)
    if not isinstance(value, np.ndarray):
        return value
    array = np.array(value)
    if not array.size:
        return array
    if batch and size and array.ndim and len(array) == batch:
        array = array[np.arange(size) % batch]
    if kind == 'elements' and array.dtype.kind in 'iub':
        low, high = min(int(array.min()), 0), max(int(array.max()), 1)
        array = random.randint(low, high + 1, array.shape).astype(array.dtype)
    elif kind == 'elements':
        array = random.permutation(array.reshape(-1)).reshape(array.shape)
    elif kind == 'rows' and array.ndim:
        array = random.permutation(array)
    if array.dtype.kind == 'f':
        if kind == 'elements' and (array < 0).any() and (array > 0).any():
            array = array * random.choice([-1, 1], array.shape)
        array = (array * random.uniform(.8, 1.2, array.shape)
                 + (array == 0) * random.uniform(0, .1, array.shape)).astype(value.dtype)
    return array


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | Variable)

