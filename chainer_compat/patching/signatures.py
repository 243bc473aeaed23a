"""Wrappers that show the signature of the wrapped function, including to inspect.getfullargspec.

Many functions are wrapped when Chainer is imported, so signatures are only computed on demand.
"""

import functools
import inspect
from collections.abc import Callable
from types import MappingProxyType
from typing import Any


def wraps(function: Any) -> Callable[[Any], Any]:
    """Return a decorator like functools.wraps that also sets the signature."""

    def decorate(wrapper: Any) -> Any:
        wrapper = functools.wraps(function)(wrapper)
        wrapper.__signature__ = _Signature(function)
        return wrapper

    return decorate


class _Signature(inspect.Signature):
    def __init__(self, function: Any) -> None:
        self._function = function

    @property
    def parameters(self) -> MappingProxyType[str, inspect.Parameter]:
        return inspect.signature(self._function).parameters

    @property
    def return_annotation(self) -> Any:
        return inspect.signature(self._function).return_annotation

    def replace(self, **changes: Any) -> Any:
        return inspect.signature(self._function).replace(**changes)

    __replace__ = replace

    def __reduce__(self) -> Any:
        return inspect.signature(self._function).__reduce__()
