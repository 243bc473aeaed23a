"""The parameters of a model with their paths, in the order that all ranks share.

Looked up anew each time, since links and parameters come and go.  What is remembered are paths in
their order, which follow from nothing but the names of the parameters.
"""
from __future__ import annotations

import functools
from typing import Any

import chainer

#: For one link with a prefix: the names of its parameters, or the paths that it gives itself.
_Names = tuple[str, frozenset[str] | tuple[str, ...]]

_Link, _Chain, _ChainList = chainer.Link, chainer.Chain, chainer.ChainList


def named_once(model: Any) -> tuple[tuple[str, ...], list[Any]]:
    """Returns paths and parameters, sorted by path, each parameter under its first path only."""
    names: list[_Names] = []
    parameters: list[Any] = []
    _walk(model, '', names, parameters)
    paths, order = _sorted(tuple(names))
    if order is not None:
        parameters = [parameters[place] for place in order]
    if len({*map(id, parameters)}) < len(parameters):
        first = {id(parameter): path for path, parameter
                 in zip(reversed(paths), reversed(parameters), strict=True)}
        named = [(path, parameter) for path, parameter in zip(paths, parameters, strict=True)
                 if first[id(parameter)] == path]
        return tuple(path for path, _ in named), [parameter for _, parameter in named]
    return paths, parameters


def _walk(link: Any, prefix: str, names: list[_Names], parameters: list[Any]) -> None:
    """Does as ``link.namedparams()``, with the paths of one link to be made later."""
    kind = _kind(link)
    if kind is None:
        named = [*link.namedparams()]
        names.append((prefix, tuple([path for path, _ in named])))
        parameters += [parameter for _, parameter in named]
        return
    own = frozenset(link._params)
    names.append((prefix, own))
    parameters += map(link.__dict__.__getitem__, _in_order(own))
    if kind is _Chain:
        for name in sorted(link._children):
            _walk(link.__dict__[name], f'{prefix}/{name}', names, parameters)
    elif kind is _ChainList:
        for number, child in enumerate(link._children):
            _walk(child, f'{prefix}/{number}', names, parameters)


def _kind(link: Any) -> Any:
    """The class of Chainer whose ``namedparams`` the link has; None if it has its own."""
    found = getattr(link.namedparams, '__func__', None)
    if found is _Link.namedparams:
        return _Link
    for kind in (_Chain, _ChainList):
        if found is kind.namedparams:
            above = super(kind, link).namedparams  # where a class of several bases can have more
            return kind if above.__func__ is _Link.namedparams else None
    return None


@functools.lru_cache(maxsize=4096)
def _in_order(names: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(names))


@functools.lru_cache(maxsize=64)
def _sorted(names: tuple[_Names, ...]) -> tuple[tuple[str, ...], list[int] | None]:
    """All paths, sorted, and at which place each was if they were not."""
    paths: list[str] = []
    for prefix, own in names:
        if isinstance(own, frozenset):
            paths += [f'{prefix}/{name}' for name in _in_order(own)]
        else:
            paths += [prefix + path for path in own]
    order = sorted(range(len(paths)), key=paths.__getitem__)
    ordered = tuple([paths[place] for place in order])
    return ordered, None if order == [*range(len(order))] else order
