"""What a recorded run replaces in Chainer and NumPy until it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from chainer import FunctionNode, Variable

from chainer_compat.pytorch.conversion.random_numbers import tracked_functions
from chainer_compat.pytorch.conversion.tracked_array import Current, tracks_copies


class Recorder(Protocol):
    """What records the run: ``tracing.Trace``."""

    is_inside: bool

    def apply(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``FunctionNode.apply`` that reports the function."""

    def array_of(self, variable: Variable, array: Any) -> Any:
        """Return the array of a Variable, which knows where it comes from."""

    def draw(self, name: str, size: Any) -> Any:
        """Return random numbers."""


@contextlib.contextmanager
def patched(record: Recorder) -> Iterator[None]:
    """Report functions, values that are taken out of variables, copies and random numbers."""
    def array(self: Variable) -> Any:
        return record.array_of(self, self._data[0])

    def item(self: Variable) -> Any:
        return record.array_of(self, self._data[0]).item()

    changes: list[tuple[Any, str, Any]] = [
        (FunctionNode, 'apply', record.apply(FunctionNode.apply)),
        (Variable, 'array', property(array, Variable.array.fset)),
        (Variable, 'data', property(array, Variable.data.fset)),
        (Variable, 'item', item),
        *((np, name, tracks_copies(getattr(np, name)))
          for name in ('array', 'asarray', 'ascontiguousarray')),
        *((np.random, name, _outside(record, function, getattr(np.random, name)))
          for name, function in tracked_functions(record.draw).items()),
        (Current, 'recorder', record),
    ]
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in changes]
    for change in changes:
        setattr(*change)
    try:
        yield
    finally:
        for original in originals:
            setattr(*original)


def _outside(record: Recorder, function: Callable[..., Any], original: Callable[..., Any]
             ) -> Callable[..., Any]:
    """Return a function for the model, and the original one for Chainer's functions."""
    return lambda *args, **kwargs: (original if record.is_inside else function)(*args, **kwargs)
