"""Replacements in Chainer and NumPy during a conversion and its recorded runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from chainer import FunctionNode, Variable
from chainer.functions.normalization import batch_normalization

from chainer_compat.pytorch.conversion.tracked_array import Array, Current, tracks_copies


class RunRecorder(Protocol):
    """The recorder of the run: ``tracing.Trace``."""

    is_inside: bool

    def apply(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``FunctionNode.apply`` that records the function."""

    def array_of(self, variable: Variable, array: Any) -> Any:
        """Return the array of a Variable as a tracked array, which records its origin."""

    def draw(self, name: str, size: Any) -> Any:
        """Return random numbers."""


@contextlib.contextmanager
def on_one_rank() -> Iterator[None]:
    """Let batch normalization use the batch of this rank only.

    The links of ``create_mnbn_model`` would wait for the other ranks.
    """
    node = batch_normalization.BatchNormalization
    original = node.__init__

    def init(self: FunctionNode, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._impl_selector = batch_normalization._impl_selector

    node.__init__ = init
    try:
        yield
    finally:
        node.__init__ = original


@contextlib.contextmanager
def patched(record: RunRecorder) -> Iterator[None]:
    """Record functions, values that are taken out of variables, copies and random numbers."""
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
          for name, function in _random_functions(record.draw).items()),
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


def _outside(record: RunRecorder, function: Callable[..., Any], original: Callable[..., Any]
             ) -> Callable[..., Any]:
    """Return a function that calls ``original`` from Chainer functions, ``function`` elsewhere."""
    return lambda *args, **kwargs: (original if record.is_inside else function)(*args, **kwargs)


def _random_functions(draw: Callable[[str, Any], Array]) -> dict[str, Callable[..., Array]]:
    """Return functions of ``numpy.random`` by name, based on two of them.

    For example, a model uses them to add noise to its inputs.

    Args:
        draw: Function that draws tracked random numbers. It is called with ``standard_normal`` or
            ``random_sample``, and the shape.
    """
    def normal(loc: Any = 0., scale: Any = 1., size: Any = None) -> Array:
        return draw('standard_normal', _shape(size, loc, scale)) * scale + loc

    def uniform(low: Any = 0., high: Any = 1., size: Any = None) -> Array:
        return draw('random_sample', _shape(size, low, high)) * (high - low) + low

    def gumbel(loc: Any = 0., scale: Any = 1., size: Any = None) -> Array:
        u = draw('random_sample', _shape(size, loc, scale))
        return np.negative(np.log(np.negative(np.log(u)))) * scale + loc

    return {
        'gumbel': gumbel, 'normal': normal, 'uniform': uniform,
        'rand': lambda *size: draw('random_sample', size),
        'randn': lambda *size: draw('standard_normal', size),
        'random': lambda size=None: draw('random_sample', _shape(size)),
        'random_sample': lambda size=None: draw('random_sample', _shape(size)),
        'standard_normal': lambda size=None: draw('standard_normal', _shape(size)),
    }


def _shape(size: Any, *parameters: Any) -> Any:
    return np.broadcast_shapes(*map(np.shape, parameters)) if size is None else size
