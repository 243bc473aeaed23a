"""State that a forward pass may read and change, so that it can be repeated, or undone."""

from __future__ import annotations

import collections
import operator
import random
import sys
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeAlias

import chainer
import numpy as np

#: Values of these types never change, or are no state of a forward pass.
_CONSTANTS = frozenset({
    int, float, complex, bool, str, bytes, type(None), type, types.FunctionType, types.MethodType,
    types.BuiltinFunctionType, types.ModuleType, chainer.Parameter})
_CONTAINERS = list, dict, set, collections.deque
#: Larger arrays, in bytes, are compared with their last copy, because they rarely change.
_LARGE = 2**20

_Array: TypeAlias = Any  # of NumPy or CuPy
#: A function that sets a state, and the state.
_Setting: TypeAlias = tuple[Callable[[Any], object], Any]


class ForwardState:
    """The state of links, and of random number generators, at the time of creation.

    The state of a link consists of its attributes, and those of its hooks: numbers, arrays,
    Variables, generators of random numbers, other links, and lists, dicts, sets and deques of
    these. Arrays and containers are copied. Parameters and objects of other classes are not.

    The generators are those of NumPy, ``random`` and, if it is loaded, PyTorch. The state of CuPy's
    generator cannot be read.

    Args:
        links: The links; also contains those that are attributes of these.
        previous: An earlier state of the same links, whose copies of large arrays are used again
            if they are equal.
    """

    def __init__(self, links: Iterable[chainer.Link], previous: ForwardState | None = None) -> None:
        self._links = [*links]
        self._previous = previous
        self._visited: set[int] = set()
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._variables: list[tuple[chainer.Variable, _Array]] = []
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._arrays: dict[int, tuple[_Array, _Array]] = {}
        self._generators = global_generators()
        self._visit_all([*self._links, *chainer._get_link_hooks().values()])
        self._previous = None  # else all states would stay in memory

    def again(self) -> ForwardState:
        """Return the present state of the same links."""
        return ForwardState(self._links, self)

    def restore(self, keep_new_parameters: bool = False) -> None:
        """Restore this state.

        Args:
            keep_new_parameters: Whether parameters and links that have been registered since remain
                in their links.
        """
        for attributes, before in self._attributes:
            new: set[str] = set()
            if keep_new_parameters:
                new.update(name for name in _registered(attributes)
                           if not isinstance(before.get(name), chainer.Parameter | chainer.Link))
            for name in attributes.keys() - before.keys() - new:
                del attributes[name]
            attributes.update((name, value) for name, value in before.items() if name not in new)
        kept = {id(attributes.get(name)) for attributes, _ in self._attributes
                for name in ('_params', '_children') if keep_new_parameters}
        for key, (container, elements) in self._containers.items():
            if key not in kept and not _is_same(container, elements):
                container.clear()
                (container.update if isinstance(container, dict | set) else container.extend)(
                    elements)
        for variable, array in self._variables:
            if variable.array is not array:
                variable.array = array
        for array, copy in self._arrays.values():
            array[...] = copy
        for set_state, state in self._generators:
            set_state(state)

    def _visit_all(self, values: Collection[Any]) -> None:
        if not _CONSTANTS.issuperset(map(type, values)):
            for value in values:
                if type(value) not in _CONSTANTS and id(value) not in self._visited:
                    self._visited.add(id(value))
                    self._visit(value)

    def _visit(self, value: Any) -> None:
        if isinstance(value, chainer.Link | chainer.LinkHook):
            attributes = vars(value)
            self._attributes.append((attributes, dict(attributes)))
            self._visit_all(attributes.values())
        elif isinstance(value, chainer.Parameter):  # of a subclass
            pass
        elif isinstance(value, chainer.Variable):
            self._variables.append((value, value.array))
            self._visit_all([value.array])
        elif isinstance(value, np.ndarray | chainer.backends.cuda.ndarray):
            self._add_array(value)
        elif isinstance(value, _CONTAINERS):
            known = self._previous and self._previous._containers.get(id(value))
            self._containers[id(value)] = (
                known if known and known[0] is value and _is_same(*known)
                else (value, _copy(value)))
            self._visit_all(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, tuple):
            self._visit_all(value)
        elif setting := _generator(value):
            self._generators.append(setting)

    def _add_array(self, x: _Array) -> None:
        if isinstance(x, np.memmap) or (isinstance(x, np.ndarray) and not x.flags.writeable):
            return
        known = None
        if x.nbytes >= _LARGE and self._previous is not None:
            known = self._previous._arrays.get(id(x))
        self._arrays[id(x)] = known if known and known[0] is x and _is_equal(*known) else (
            x, x.copy())


def global_generators() -> list[_Setting]:
    """Return how to restore the generators that all code shares."""
    settings = [(np.random.set_state, np.random.get_state(legacy=False)),
                (random.setstate, random.getstate())]
    if torch := sys.modules.get('torch'):
        settings.append((torch.set_rng_state, torch.get_rng_state()))
        if torch.cuda.is_initialized():
            settings.append((torch.cuda.set_rng_state, torch.cuda.get_rng_state()))
    return settings


def _generator(value: Any) -> _Setting | None:
    """Return how to restore a generator of random numbers; ``None`` if it is none."""
    if isinstance(value, np.random.RandomState):
        return value.set_state, value.get_state(legacy=False)
    if isinstance(value, np.random.Generator):
        value = value.bit_generator
    if isinstance(value, np.random.BitGenerator):
        return (lambda state: setattr(value, 'state', state)), value.state
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.setstate, value.getstate()
    torch = sys.modules.get('torch')
    if torch and isinstance(value, torch.Generator):
        return value.set_state, value.get_state()
    return None


def _registered(attributes: dict[str, Any]) -> set[str]:
    """Return the names of parameters and child links."""
    return {name for key in ('_params', '_children') for name in attributes.get(key, ())
            if isinstance(name, str)}


def _copy(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else type(container).copy(container)


def _is_same(container: Any, elements: Any) -> bool:
    """Return whether a container has these elements, in this order: they may have no ``==``."""
    if len(container) != len(elements):
        return False
    if isinstance(container, set):
        return bool(container == elements)
    return all(map(operator.is_, container, elements)) and (
        not isinstance(container, dict)
        or all(map(operator.is_, container.values(), elements.values())))


def _is_equal(x: _Array, y: _Array) -> bool:
    """Return whether arrays have the same bits."""
    xp = chainer.backend.get_array_module(x)
    x, y = (xp.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (x, y))
    return bool((x == y).all())
