"""NumPy arrays that track the origin of their values.

During a traced run, the model gets such arrays as inputs and as ``variable.array``. NumPy functions
with an expression become part of the graph. All other functions mark their result, which raises an
error as soon as a Chainer function or an ``if`` uses it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from chainer_compat.pytorch.conversion.errors import ADVICE, ConversionError

Array = np.ndarray[Any, Any]

IN_PLACE = 'modifies an array that was computed from the inputs'


#: Python expressions in user code, by the method that Python calls for them.
WRITTEN = {
    '__bool__': 'a condition (if, while, assert, and, or, not)', '__int__': 'int(...)',
    '__float__': 'float(...)', '__complex__': 'complex(...)', 'shape': 'len(...) or .shape',
    '__index__': 'range(...) or the index of a list', 'item': '.item()', 'tolist': '.tolist()',
    'flat': '.flat', '__contains__': 'the operator in'}


#: Functions whose results have sizes that depend on values.
SIZED_BY_VALUES = {f'numpy.{name}' for name in (
    'nonzero', 'flatnonzero', 'argwhere', 'unique', 'unique_values', 'compress', 'extract',
    'intersect1d', 'union1d', 'setdiff1d', 'setxor1d', 'bincount', 'repeat', 'delete')}


class Recorder(Protocol):
    """The part of the traced run that arrays need."""

    is_inside: bool  # whether a Chainer function is running

    def numpy_function(self, name: str, args: Any, kwargs: Any, result: Any) -> Any:
        """Record a NumPy function, and return its result as a tracked array."""

    def place(self) -> str:
        """Return the link and the line of user code that are being executed."""

    def source(self) -> str:
        """Return the text of this line."""


class Current:
    """The traced run of this process, if there is one."""

    recorder: Recorder | None = None


class Lost:
    """The origin of a value that a NumPy function without an expression computed."""

    def __init__(self, name: str) -> None:
        self.name = name


class TrackedArray(np.ndarray):
    """An array with a reference to its origin, which is lost in views that C code creates."""

    reference: Any = Lost('a view')

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if 'out' in options:
            _reject(f'numpy.{ufunc.__name__} {IN_PLACE}')
        result = getattr(ufunc, method)(*plain(inputs), **plain(options))
        name = ufunc.__name__ if method == '__call__' else f'{ufunc.__name__}.{method}'
        return _tracked(name, inputs, options, result)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _tracked(function.__name__, args, kwargs, function(*plain(args), **plain(kwargs)))

    def __getitem__(self, key: Any) -> Any:
        return _tracked('getitem', (self, key), {}, plain(self)[plain(key)])

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __setitem__(self, key: Any, value: Any) -> None:
        _reject(f'an assignment {IN_PLACE}')
        plain(self)[key] = value

    def __reduce__(self) -> Any:
        return plain(self).__reduce__()

    def __deepcopy__(self, memo: Any) -> Any:
        return self


def plain(value: Any) -> Any:
    """Return a value without references to origins: tracked arrays become NumPy arrays."""
    if isinstance(value, TrackedArray):
        return value.view(np.ndarray)
    if type(value) in (tuple, list):
        return type(value)(plain(each) for each in value)
    if type(value) is dict:
        return {key: plain(each) for key, each in value.items()}
    if type(value) is slice:
        return slice(*plain((value.start, value.stop, value.step)))
    return value


def tracked(array: Any, reference: Any) -> TrackedArray:
    """Return an array that is tracked as coming from ``reference``."""
    result = np.asarray(array).view(TrackedArray)
    result.reference = reference
    return result


def elements(value: Any) -> Iterator[Any]:
    """Yield the elements of nested dicts, lists, tuples and slices."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, slice):
        value = value.start, value.stop, value.step
    if isinstance(value, tuple | list):
        for each in value:
            yield from elements(each)
    else:
        yield value


def tracks_copies(original: Callable[..., Array]) -> Callable[..., Array]:
    """Return a ``numpy.array`` or ``asarray`` that tracks the origin of the values."""

    @functools.wraps(original)
    def create(value: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(plain(value), *args, **kwargs)
        if isinstance(value, TrackedArray):
            return _tracked('astype', (value, result.dtype), {}, result)
        if any(isinstance(each, TrackedArray) for each in elements(value)):
            return _tracked('array', (value, result.dtype), {}, result)
        return result

    return create


def _tracked(name: str, args: Any, kwargs: Any, result: Any) -> Any:
    recorder = Current.recorder
    if recorder is None or recorder.is_inside:
        return result
    return recorder.numpy_function(name, args, kwargs, result)


def _reject(what: str) -> None:
    recorder = Current.recorder
    if recorder is not None and not recorder.is_inside:
        raise ConversionError(f'The model cannot be converted: {what} ({recorder.place()}). '
                              'Compute a new array instead.')


def _method(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: TrackedArray, *args: Any, **kwargs: Any) -> Any:
        array = plain(self)
        return _tracked(name, (self, *args), kwargs,
                        function(array, *plain(args), **plain(kwargs)))

    return method


def _python_value(name: str) -> Callable[..., Any]:
    def method(self: TrackedArray, *args: Any) -> Any:
        _reject_value(WRITTEN[name])
        return getattr(plain(self), name)(*args)

    return method


def _reject_value(written: str) -> None:
    recorder = Current.recorder
    if recorder is not None and not recorder.is_inside:
        raise ConversionError(
            f'The model cannot be converted: {written} uses a value that depends on the inputs, '
            'but the module would always use the value from the example ('
            f'{recorder.place()}{recorder.source()}). {ADVICE}.')


def _shape(name: str) -> property:
    """Return a property for the shape, which depends on values for some functions."""
    def shape(self: TrackedArray) -> Any:
        if isinstance(self.reference, Lost) and (
                self.reference.name.split(' ')[0] in SIZED_BY_VALUES):
            _reject_value(WRITTEN.get(name, f'.{name}'))
        return getattr(plain(self), name)

    return property(shape)


def _flat(self: TrackedArray) -> Any:
    _reject_value(WRITTEN['flat'])
    return plain(self).flat


#: Attributes that do not contain values.
_SAFE = frozenset({'dtype', 'shape', 'ndim', 'size', 'itemsize', 'nbytes', 'strides', 'flags',
                   'base', 'view', 'T', 'mT', 'ctypes', 'data', 'device'})

for _name in dir(np.ndarray):
    _value = getattr(np.ndarray, _name)
    if not _name.startswith('_') and _name not in _SAFE and callable(_value):
        setattr(TrackedArray, _name, _method(_name, _value))
for _name in ('__bool__', '__int__', '__float__', '__index__', '__complex__', '__contains__',
              'item', 'tolist'):
    setattr(TrackedArray, _name, _python_value(_name))
for _name in 'shape', 'size':
    setattr(TrackedArray, _name, _shape(_name))
TrackedArray.__len__ = lambda self: self.shape[0]  # type: ignore[method-assign]
TrackedArray.flat = property(_flat)  # type: ignore[assignment]
TrackedArray.T = property(  # type: ignore[assignment]
    lambda self: _tracked('transpose', (self,), {}, plain(self).T))
