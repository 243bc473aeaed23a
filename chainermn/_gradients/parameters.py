"""The parameters of a model, sorted by path: the same order on all ranks.

The model is traversed each time, because links and parameters may be added or removed. Only sorted
paths and descriptions are cached, which depend on names, dtypes and shapes alone.
"""
from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import chainer
import numpy as np

from chainermn._gradients import tied_arrays
from chainermn._operations import call_signature
from chainermn._transport import array_buffers
from chainermn._transport.array_list import ArrayList
from chainermn._types import Array, Model, Parameter

_FLOATS = frozenset(map(np.dtype, ('float16', 'float32', 'float64')))
_dtype_of, _shape_of = operator.attrgetter('dtype'), operator.attrgetter('shape')
_is_writeable = operator.attrgetter('flags.writeable')
_is_simple = operator.attrgetter('flags.carray')  # C-contiguous, aligned and writable

#: The prefix of a link, and the names of its parameters, or the paths that a custom ``namedparams``
#: returns.
_Names = tuple[str, frozenset[str] | tuple[str, ...]]

_Link, _Chain, _ChainList = chainer.Link, chainer.Chain, chainer.ChainList


class Layout(NamedTuple):
    """The dtypes and shapes by path, and their digest. They must be the same on all ranks."""

    described: Mapping[str, str]
    digest: int

    @classmethod
    def of(cls, described: Mapping[str, str]) -> Layout:
        return cls(described, call_signature.digest(dict(described)))


class ParameterList(ArrayList):
    """The parameters or gradients of a model, collected once per operation.

    Attributes:
        paths: The path of each array.
    """

    paths: tuple[str, ...]

    @classmethod
    def of_model(cls, model: Model, attribute: Literal['data', 'grad'], zero_fill: bool = False
                 ) -> ParameterList:
        """Collect the arrays of a model.

        Args:
            model: A ``chainer.Link``.
            attribute: ``'data'`` for the parameters, ``'grad'`` for the gradients.
            zero_fill: Whether initialized parameters without a gradient get a gradient of zeros.

        Returns:
            The arrays of the initialized parameters, without missing gradients, sorted by path. A
            parameter with several paths appears once.

        Raises:
            TypeError, ValueError: If the model is not a link, or an array cannot be sent.
        """
        if isinstance(model, type):
            raise TypeError(f'expected a model (chainer.Link), but got the class '
                            f'{model.__name__}; pass an instance')
        if not hasattr(model, 'namedparams'):
            raise TypeError(f'expected a model (chainer.Link), but got {type(model)}; for other '
                            'data, use an operation for arrays or objects, such as bcast_obj')
        paths, parameters = _sorted_parameters(model)
        if attribute == 'grad':
            with contextlib.suppress(RuntimeError):  # a parameter that is not initialized
                grads = _gradients_of(parameters)
                # Fast path: there may be thousands of parameters.
                if [*map(type, grads)].count(np.ndarray) == len(grads):
                    dtypes = {*map(_dtype_of, grads)}
                    if dtypes <= _FLOATS and (
                            all(map(_is_simple, grads)) or (all(map(_is_writeable, grads))
                            and not any(map(_repeats_elements, grads)))) and (
                            not tied_arrays.sharing_memory(grads)):
                        found = cls(grads)
                        found.paths, found.on_host, found.on_device = paths, True, False
                        found.dtypes = tuple(
                            dtypes if len(dtypes) == 1 else map(_dtype_of, grads))
                        found.shapes = tuple(map(_shape_of, grads))
                        return found  # distinct gradients, so distinct parameters
        paths, parameters = _without_repeated(paths, parameters)
        arrays: dict[str, Array] = {}
        for path, parameter in zip(paths, parameters, strict=True):
            array = _array_of(parameter)
            if array is None:
                continue
            if attribute == 'grad':
                if zero_fill and parameter.grad is None:
                    parameter.grad = chainer.backend.get_array_module(array).zeros_like(array)
                array = parameter.grad
                if array is None:
                    continue
                if isinstance(array, np.ndarray) and (
                        not array.flags.writeable or _repeats_elements(array)):
                    # Backward can create read-only gradients: F.sum broadcasts a scalar.
                    parameter.grad = array = array.copy()
            arrays[path] = _checked(path, attribute, array)
        if attribute == 'grad':
            by_path = dict(zip(paths, parameters, strict=True))
            found_paths = [*arrays]
            for group in tied_arrays.sharing_memory([*arrays.values()]):
                # The backward pass of a + b gives a and b the same gradient array, and hooks would
                # change this array twice.
                for path in map(found_paths.__getitem__, group[1:]):
                    by_path[path].grad = arrays[path] = arrays[path].copy()
        return cls.named(arrays)

    @classmethod
    def named(cls, arrays: Mapping[str, Array]) -> ParameterList:
        """Return a list of the arrays in a mapping by path."""
        found = cls.of(arrays.values())
        assert isinstance(found, cls)
        found.paths = tuple(arrays)
        return found

    def by_path(self) -> dict[str, Array]:
        """Return the arrays by path."""
        return dict(zip(self.paths, self, strict=True))

    def layout(self, allows_mixed_devices: bool) -> Layout:
        """Return the properties that must be the same on all ranks.

        Args:
            allows_mixed_devices: Whether a model may be on a device on some ranks only.
        """
        if self.on_host:
            return _layout(self.paths, self.dtypes, self.shapes)
        on_device = tuple(map(array_buffers.on_device, self))
        if allows_mixed_devices and all(on_device):
            return _layout(self.paths, self.dtypes, self.shapes)
        return _layout(self.paths, self.dtypes, self.shapes, on_device)


@functools.lru_cache(maxsize=64)
def _layout(paths: tuple[str, ...], dtypes: tuple[np.dtype, ...],
            shapes: tuple[tuple[int, ...], ...], on_device: tuple[bool, ...] = ()) -> Layout:
    if len(dtypes) == 1:
        dtypes *= len(paths)
    places = [' on device' if device else '' for device in on_device] or [''] * len(paths)
    described = {path: f'{dtype} {shape}{place}' for path, dtype, shape, place
                 in zip(paths, dtypes, shapes, places, strict=True)}
    return Layout.of(described)


def _gradients_of(parameters: Sequence[Parameter]) -> list[Array | None]:
    """Return the gradients of parameters: like ``parameter.grad``, but in a third of the time."""
    kind = chainer.Parameter
    return [
        (values['_grad'] if (variable := values['_grad_var']) is None else variable._data[0])
        if type(parameter) is kind and (values := parameter.__dict__)['_layout'] is None
        and values['_grad_valid'] and not values.get('_has_chainerx_array')
        else parameter.grad for parameter in parameters]


def _array_of(parameter: Parameter) -> Array | None:
    """Return the array of a parameter. A custom parameter class may have only ``data``."""
    return parameter.raw_array if hasattr(parameter, 'raw_array') else parameter.data


def _checked(path: str, attribute: str, array: Array) -> Array:
    """Return an array that can be sent, or raise an error."""
    try:
        array_buffers.checked(array)
    except TypeError as error:
        raise TypeError(f'parameter {path}: {error}') from None
    if attribute == 'grad' and array.dtype.kind != 'f':
        raise TypeError(f'parameter {path}: gradients of dtype {array.dtype} cannot be averaged; '
                        'use a floating-point dtype')
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError(f'parameter {path}: its array is read-only; assign a writable copy')
    if _repeats_elements(array):
        raise ValueError(f'parameter {path}: several elements of its array share the same memory '
                         '(e.g. after broadcast_to); assign array.copy()')
    if not array.dtype.isnative:
        raise TypeError(f'parameter {path}: its array has a non-native byte order; assign '
                        f'array.astype({array.dtype.name!r})')
    return array_buffers.without_subclass(array)


def _repeats_elements(array: Array) -> bool:
    """Return whether several elements share the same memory, as in a broadcast array."""
    return 0 in array.strides and array.size > 1 and any(
        not stride and n > 1 for stride, n in zip(array.strides, array.shape, strict=True))


def sorted_parameters(model: Model) -> tuple[tuple[str, ...], list[Parameter]]:
    """Return paths and parameters, sorted by path. Each parameter has only its first path."""
    return _without_repeated(*_sorted_parameters(model))


def _sorted_parameters(model: Model) -> tuple[tuple[str, ...], list[Parameter]]:
    """Return paths and parameters, sorted by path. A parameter may have several paths."""
    names: list[_Names] = []
    parameters: list[Parameter] = []
    _walk(model, '', names, parameters)
    paths, order = _sorted(tuple(names))
    if order is not None:
        parameters = [parameters[place] for place in order]
    return paths, parameters


def _without_repeated(paths: tuple[str, ...], parameters: list[Parameter]
                      ) -> tuple[tuple[str, ...], list[Parameter]]:
    """Remove all but the first path of each parameter."""
    if not _are_distinct(tuple(map(tied_arrays.identity, parameters))):
        first = {id(parameter): path for path, parameter
                 in zip(reversed(paths), reversed(parameters), strict=True)}
        named = [(path, parameter) for path, parameter in zip(paths, parameters, strict=True)
                 if first[id(parameter)] == path]
        return tuple(path for path, _ in named), [parameter for _, parameter in named]
    return paths, parameters


@functools.lru_cache(maxsize=64)
def _are_distinct(ids: tuple[int, ...]) -> bool:
    return len({*ids}) == len(ids)


def _walk(link: Model, prefix: str, names: list[_Names], parameters: list[Parameter]) -> None:
    """Like ``link.namedparams()``, but collects prefixes and names; paths are built later."""
    kind = _namedparams_class(link)
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


def _namedparams_class(link: Model) -> type | None:
    """Return the Chainer class whose ``namedparams`` a link uses; ``None`` if it overrides it."""
    if not isinstance(link, _Link):  # a proxy
        return None
    found = getattr(link.namedparams, '__func__', None)
    if found is _Link.namedparams:
        return _Link
    for kind in (_Chain, _ChainList):
        if found is kind.namedparams:
            above = super(kind, link).namedparams  # another base class may override it
            return kind if above.__func__ is _Link.namedparams else None
    return None


@functools.lru_cache(maxsize=4096)
def _in_order(names: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(names))


@functools.lru_cache(maxsize=64)
def _sorted(names: tuple[_Names, ...]) -> tuple[tuple[str, ...], list[int] | None]:
    """Return the sorted paths, and the permutation; ``None`` if they were already sorted."""
    paths: list[str] = []
    for prefix, own in names:
        if isinstance(own, frozenset):
            paths += [f'{prefix}/{name}' for name in _in_order(own)]
        else:
            paths += [prefix + path for path in own]
    order = sorted(range(len(paths)), key=paths.__getitem__)
    ordered = tuple([paths[place] for place in order])
    return ordered, None if order == [*range(len(order))] else order
