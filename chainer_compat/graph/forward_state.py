"""State that a forward pass may read and change, so that the pass can be repeated or undone."""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeAlias

import chainer
import numpy as np

_CONTAINERS = list, dict, set, collections.deque
#: Arrays of at least this many bytes are compared with their last copy, because they rarely change.
_LARGE = 2**20

_Array: TypeAlias = Any  # of NumPy or CuPy
#: A function that sets a state, and the state.
_Setting: TypeAlias = tuple[Callable[[Any], object], Any]


class ForwardState:
    """The state of links and random number generators at the time of creation.

    The state of a link consists of its attributes and its hooks' attributes: numbers, arrays,
    Variables, random number generators, other links, and lists, dicts, sets and deques of
    these. Arrays and containers are copied. Parameters and objects of other classes are not.

    The global generators of NumPy, ``random`` and, if it is loaded, PyTorch are included. The state
    of CuPy's generator cannot be read.

    Args:
        links: The links. Links among their attributes are included.
        previous: An earlier state of the same links. Its copies of large arrays are reused if the
            arrays have not changed.
    """

    def __init__(self, links: Iterable[chainer.Link], previous: ForwardState | None = None) -> None:
        self._links = [*links]
        self._previous = previous
        #: Visited objects by id. References are kept so that ids are not reused.
        self._visited: dict[int, Any] = {}
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._variables: list[tuple[chainer.Variable, _Array]] = []
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._arrays: dict[int, tuple[_Array, _Array]] = {}
        self._generators = global_generators()
        self._visit_all([*self._links, *chainer._get_link_hooks().values()])
        self._previous = None  # otherwise, all states would stay in memory

    def add(self, link: chainer.Link) -> None:
        """Add the current state of another link, unless it is already included."""
        if id(link) not in self._visited:
            self._links.append(link)
            self._visit_all([link])

    def again(self) -> ForwardState:
        """Return the current state of the same links."""
        return ForwardState(self._links, self)

    def restore(self, keep_new_parameters: bool = False) -> None:
        """Restore this state.

        Args:
            keep_new_parameters: Whether to keep parameters and links that were registered after
                this state was captured.
        """
        for attributes, before in self._attributes:
            new: set[str] = set()
            if keep_new_parameters:
                new.update(name for name in _registered(attributes)
                           if not isinstance(before.get(name), chainer.Parameter | chainer.Link))
            for name in attributes.keys() - before.keys() - new:
                del attributes[name]
            attributes.update((name, value) for name, value in before.items() if name not in new)
        unchanged = {id(attributes.get(name)) for attributes, _ in self._attributes
                     for name in ('_params', '_children') if keep_new_parameters}
        for key, (container, elements) in self._containers.items():
            if key not in unchanged and not _is_same(container, elements):
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
        kinds: set[Any] = {*map(type, values)}  # few types, even if there are many values
        methods = {kind: _method(kind) for kind in kinds}
        if any(methods.values()):
            for value in values:
                method = methods[type(value)]
                if method is not None and id(value) not in self._visited:
                    self._visited[id(value)] = value
                    method(self, value)

    def _add_object(self, x: chainer.Link | chainer.LinkHook) -> None:
        attributes = vars(x)
        self._attributes.append((attributes, dict(attributes)))
        self._visit_all(attributes.values())

    def _add_variable(self, x: chainer.Variable) -> None:
        self._variables.append((x, x.array))
        self._visit_all([x.array])

    def _add_container(self, x: Any) -> None:
        known = self._previous and self._previous._containers.get(id(x))
        self._containers[id(x)] = known if known and known[0] is x and _is_same(*known) else (
            x, dict(x) if isinstance(x, dict) else type(x).copy(x))
        self._visit_all(x.values() if isinstance(x, dict) else x)

    def _add_generator(self, x: Any) -> None:
        if isinstance(x, np.random.Generator):
            x = x.bit_generator
        if isinstance(x, np.random.BitGenerator):
            self._generators.append(((lambda state: setattr(x, 'state', state)), x.state))
        elif isinstance(x, random.Random):
            self._generators.append((x.setstate, x.getstate()))
        else:  # a RandomState, or a generator of PyTorch
            self._generators.append((x.set_state, x.get_state()))

    def _add_array(self, x: _Array) -> None:
        if isinstance(x, np.memmap) or (isinstance(x, np.ndarray) and not x.flags.writeable):
            return
        known = None
        if x.nbytes >= _LARGE and self._previous is not None:
            known = self._previous._arrays.get(id(x))
        self._arrays[id(x)] = known if known and known[0] is x and _is_equal(*known) else (
            x, x.copy())


class _Calls(chainer.LinkHook):
    """Adds links to a state when they are called."""

    def __init__(self, state: ForwardState) -> None:
        self.name = f'chainer_compat {id(self)}'  # unique, because hooks can be nested
        self._state = state

    def forward_preprocess(self, args: Any) -> None:
        self._state.add(args.link)


@contextlib.contextmanager
def state_before(func: Callable[..., Any]) -> Iterator[ForwardState]:
    """Yield the state of the links that a function uses: its owner, and the links that it calls.

    The state of each link is captured before its first call.
    """
    owner = getattr(func, '__self__', func)
    state = ForwardState([owner] if isinstance(owner, chainer.Link) else [])
    with _Calls(state):
        yield state


def global_generators() -> list[_Setting]:
    """Return the setters and the states of the global random number generators."""
    settings: list[_Setting] = [
        (np.random.set_state, np.random.get_state(legacy=False)),
        (random.setstate, random.getstate())]
    if torch := sys.modules.get('torch'):
        settings.append((torch.set_rng_state, torch.get_rng_state()))
        if torch.cuda.is_initialized():
            settings.append((torch.cuda.set_rng_state, torch.cuda.get_rng_state()))
    return settings


@functools.lru_cache(4096)
def _method(kind: type) -> Callable[[ForwardState, Any], None] | None:
    """Return the method that adds objects of a class; ``None`` if they hold no state."""
    torch = sys.modules.get('torch')
    kinds: list[tuple[tuple[type, ...], Callable[[ForwardState, Any], None] | None]] = [
        ((chainer.Parameter, random.SystemRandom), None),
        ((chainer.Link, chainer.LinkHook), ForwardState._add_object),
        ((chainer.Variable,), ForwardState._add_variable),
        ((np.ndarray, chainer.backends.cuda.ndarray), ForwardState._add_array),
        (_CONTAINERS, ForwardState._add_container),
        ((tuple,), ForwardState._visit_all),
        ((np.random.RandomState, np.random.Generator, np.random.BitGenerator, random.Random,
          *([torch.Generator] if torch else [])), ForwardState._add_generator),
    ]
    return next((method for classes, method in kinds if issubclass(kind, classes)), None)


def _registered(attributes: dict[str, Any]) -> set[str]:
    """Return the names of parameters and child links."""
    return {name for key in ('_params', '_children') for name in attributes.get(key, ())
            if isinstance(name, str)}


def _is_same(container: Any, elements: Any) -> bool:
    """Return whether a container has these elements, in this order.

    Elements are compared by identity, because they may not support ``==``.
    """
    if len(container) != len(elements):
        return False
    if isinstance(container, set):
        return bool(container == elements)
    return all(map(operator.is_, container, elements)) and (
        not isinstance(container, dict)
        or all(map(operator.is_, container.values(), elements.values())))


def _is_equal(x: _Array, y: _Array) -> bool:
    """Return whether two arrays are bitwise identical."""
    xp = chainer.backend.get_array_module(x)
    x, y = (xp.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (x, y))
    return bool((x == y).all())
