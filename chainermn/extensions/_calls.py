"""A decorator for methods of extensions, which adds the extension's name to collective errors."""
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from chainermn.communicators.communicator_base import CommunicatorBase


class _Extension(Protocol):
    comm: CommunicatorBase


_E = TypeVar('_E', bound=_Extension)
_P = ParamSpec('_P')
_R = TypeVar('_R')


def called_by(name: str) -> Callable[[Callable[Concatenate[_E, _P], _R]],
                                     Callable[Concatenate[_E, _P], _R]]:
    """Return a decorator for methods of an extension with the attribute ``comm``.

    Args:
        name: Name of the extension; see :meth:`chainermn.CommunicatorBase.called_by`.
    """
    def decorate(method: Callable[Concatenate[_E, _P], _R]
                 ) -> Callable[Concatenate[_E, _P], _R]:
        @functools.wraps(method)
        def named(self: _E, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self.comm.called_by(name):
                try:
                    return method(self, *args, **kwargs)
                except TypeError as error:
                    if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                        raise
                    # The arguments do not match the signature. An error raised here is printed
                    # without this frame.
                    raise TypeError(
                        f'{error}. Call {method.__name__}({_arguments(method)}).') from None

        return named

    return decorate


def _arguments(method: Callable[..., object]) -> str:
    """Return the arguments of a method with their defaults, without types."""
    _, *parameters = inspect.signature(method).parameters.values()
    return ', '.join(str(each.replace(annotation=each.empty)) for each in parameters)
