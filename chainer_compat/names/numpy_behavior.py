"""Calls that NumPy accepted up to 2.3 and now rejects: ``CHAINER_COMPAT_NAMES=all`` allows them.

Methods are set on NumPy's types themselves, so that all arrays have them, in all libraries.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    Method = Callable[..., Any]
    Array = NDArray[Any]

IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE of CPython
POINTERS_BEFORE_FLAGS = 19  # fields of PyTypeObject between PyObject_HEAD and tp_flags


def restore(numpy: ModuleType) -> None:
    """Restore the behavior that the installed version of NumPy rejects. Idempotent."""
    if hasattr(numpy.array, 'restored_by'):
        return
    version = tuple(int(part) for part in numpy.__version__.split('.')[:2])
    if version >= (2, 0):
        _set_methods(numpy.generic, SCALAR_METHODS)
        _set_methods(numpy.ndarray, METHODS)
    if version >= (2, 4):
        _set_methods(numpy.ndarray, {
            f'__{number.__name__}__': _of_one_element(
                number, getattr(numpy.ndarray, f'__{number.__name__}__'))
            for number in (float, int, complex)})
    for name, wrap in WRAPPERS.items():
        function = getattr(numpy, name)
        wrapped = functools.update_wrapper(wrap(function), function)
        wrapped.restored_by = __name__  # type: ignore[attr-defined]
        setattr(numpy, name, wrapped)


def _set_methods(cls: type, methods: dict[str, Method]) -> None:
    with _mutable(cls):
        for name, method in methods.items():
            setattr(cls, name, method)


@contextmanager
def _mutable(cls: type) -> Iterator[None]:
    """Make the attributes of a type that is written in C writable."""
    pointer = ctypes.sizeof(ctypes.c_void_p)
    address = id(cls) + object.__basicsize__ + POINTERS_BEFORE_FLAGS * pointer
    flags = ctypes.c_ulong.from_address(address)
    if flags.value != cls.__flags__:
        raise RuntimeError(
            "CHAINER_COMPAT_NAMES=all does not support this Python's type layout, so it cannot "
            f'change {cls}. Use CPython 3.10 to 3.15 with a global interpreter lock.')
    immutable = flags.value & IMMUTABLE
    flags.value &= ~IMMUTABLE
    try:
        yield
    finally:
        flags.value |= immutable


def _of_one_element(number: type, convert: Method) -> Method:
    """Return a method that converts arrays with one element to a Python number."""
    def convert_one(self: Array) -> Any:
        return number(self.item()) if self.size == 1 else convert(self)

    return functools.update_wrapper(convert_one, convert)


def itemset(self: Array, *args: Any) -> None:
    """Set one element: the only one, or the one with the given index or indices."""
    *index, value = args
    if not index:
        self.reshape(())[()] = value
    elif len(index) == 1 and not isinstance(index[0], tuple):
        self.flat[index[0]] = value
    else:
        self[index[0] if len(index) == 1 else tuple(index)] = value


def newbyteorder(self: Array, new_order: str = 'S') -> Array:
    """Return a view of the same bytes with a different byte order."""
    return self.view(self.dtype.newbyteorder(new_order))  # type: ignore[arg-type]


def ptp(self: Array, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
    """Return the difference between the maximum and the minimum."""
    import numpy as np

    return np.ptp(self, axis, out, keepdims)


def tostring(self: Array, order: Any = 'C') -> bytes:
    """Return the bytes of all elements."""
    return self.tobytes(order)


METHODS: dict[str, Method] = {
    function.__name__: function for function in (itemset, newbyteorder, ptp, tostring)}
SCALAR_METHODS = {name: METHODS[name] for name in ('newbyteorder', 'tostring')}


def _with_object_arrays(function: Method) -> Method:
    """Make object arrays of lists with unequal lengths; copy for ``copy=False`` if necessary."""

    def create(*args: Any, **options: Any) -> Any:
        import numpy as np

        if options.get('copy') is False and function.__name__ == 'array':
            options['copy'] = None if np.__version__ >= '2' else False
        try:
            return function(*args, **options)
        except ValueError as error:
            dtype = args[1] if len(args) > 1 else options.get('dtype')
            if dtype is not None or 'inhomogeneous' not in str(error):
                raise
            if len(args) > 1:
                return function(args[0], 'O', *args[2:], **options)
            return function(*args, **{**options, 'dtype': 'O'})

    return create


def _from_string(function: Method) -> Method:
    """Wrap ``fromstring`` to read the elements from raw bytes if ``sep`` is empty."""

    def from_string(string: Any, dtype: DTypeLike = float, count: int = -1, *args: Any,
                    sep: str = '', **options: Any) -> Array:
        import numpy as np

        if sep:
            return function(string, dtype, count, *args, sep=sep, **options)
        data = string.encode('latin1') if isinstance(string, str) else string
        return np.frombuffer(data, dtype, count).copy()

    return from_string


def _renamed(old: str, new: str) -> Callable[[Method], Method]:
    def wrap(function: Method) -> Method:
        def call(*args: Any, **options: Any) -> Any:
            if old in options:
                options[new] = options.pop(old)
            return function(*args, **options)

        return call

    return wrap


WRAPPERS: dict[str, Callable[[Method], Method]] = {
    **dict.fromkeys(('array', 'asanyarray', 'asarray'), _with_object_arrays),
    **dict.fromkeys(('percentile', 'quantile', 'nanpercentile', 'nanquantile'),
                    _renamed('interpolation', 'method')),
    'fromstring': _from_string,
}
