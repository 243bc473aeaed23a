"""Records the time that Chainer's updaters take to load a batch, as the span ``data``."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from chainer import iterators
from chainer.dataset import convert

from chainermn._timeline import recorder

_P = ParamSpec('_P')
_S = TypeVar('_S')
_R = TypeVar('_R')


def record() -> None:
    """Wrap ``next`` of Chainer's iterators and the function that calls converters."""
    for kind in (iterators.SerialIterator, iterators.MultiprocessIterator,
                 iterators.MultithreadIterator, iterators.DaliIterator):
        kind.__next__ = kind.next = _spanned(kind.__next__)
    convert._call_converter = _spanned(convert._call_converter)


def _spanned(function: Callable[Concatenate[_S, _P], _R]
             ) -> Callable[Concatenate[_S, _P], _R]:
    @functools.wraps(function)
    def run(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with recorder.span('data'):
            return function(self, *args, **kwargs)

    return run
