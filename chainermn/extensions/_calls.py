"""Methods of extensions whose exchanges name the extension."""
from __future__ import annotations

import functools
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
        name: The name of the extension; see :meth:`chainermn.CommunicatorBase.called_by`.
    """
    def decorate(method: Callable[Concatenate[_E, _P], _R]
                 ) -> Callable[Concatenate[_E, _P], _R]:
        @functools.wraps(method)
        def named(self: _E, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self.comm.called_by(name):
                return method(self, *args, **kwargs)

        return named

    return decorate
