"""Collects the parameters of a model without nested generators."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from chainer.link import Chain, ChainList, Link
from chainer.variable import Parameter

_METHODS = 'params', 'namedparams'

#: Chainer's methods, for each class that defines them.
_ORIGINALS = {(cls, name): vars(cls)[name] for cls in (Link, Chain, ChainList) for name in _METHODS}

#: The class that defines each pair of methods.
_KINDS: dict[tuple[object, ...], type] = {
    tuple([_ORIGINALS[cls, name] for name in _METHODS]): cls for cls in (Link, Chain, ChainList)}


def parameters(model: Any) -> list[Any] | None:
    """Return the parameters that ``params`` yields, in its order, including uninitialized ones.

    Returns:
        The parameters; ``None`` if a link overrides ``params`` or ``namedparams``.
    """
    found: list[Any] = []
    is_known = all([vars(cls).get(name) is method for (cls, name), method in _ORIGINALS.items()])
    return found if is_known and _add(model, found) else None


_cleargrad = Parameter.cleargrad


def quick_cleargrads(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a ``Link.cleargrads`` that clears ordinary parameters directly."""
    @functools.wraps(original)
    def cleargrads(self: Any) -> None:
        params = parameters(self)
        if params is None or Parameter.cleargrad is not _cleargrad:
            original(self)
            return
        for param in params:
            if type(param) is Parameter and type(param._data[0]) is np.ndarray:
                attributes = param.__dict__
                if 'cleargrad' not in attributes:
                    attributes['_grad_var'] = attributes['_grad'] = None
                    attributes['_grad_valid'] = True
                    continue
            param.cleargrad()

    return cleargrads


def _add(link: Any, found: list[Any]) -> bool:
    """Add the parameters of a link to ``found``; return False if it overrides a method."""
    cls: Any = type(link)
    attributes = link.__dict__
    kind = _KINDS.get((getattr(cls, 'params', None), getattr(cls, 'namedparams', None)))
    if kind is None or 'params' in attributes or 'namedparams' in attributes or not (
            kind is Link or _is_above_link(kind, weakref.ref(cls))):
        return False
    found += map(attributes.__getitem__, _in_order(frozenset(link._params)))
    if kind is Chain:
        return all([_add(attributes[name], found)
                    for name in _in_order(frozenset(link._children))])
    return kind is Link or all([_add(child, found) for child in link._children])


@functools.lru_cache(maxsize=1024)
def _is_above_link(kind: type, cls: weakref.ref[type]) -> bool:
    """Return whether no class between ``kind`` and Link in the MRO overrides the methods.

    The class is only referenced weakly, because methods of a user's class may refer to a dataset.
    """
    above = super(kind, cls())
    return all([getattr(above, name) is _ORIGINALS[Link, name] for name in _METHODS])


@functools.lru_cache(maxsize=4096)
def _in_order(names: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(names))
