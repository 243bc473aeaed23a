"""The error for models and optimizers that cannot be converted."""

import contextlib
import functools
import sys
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from chainer_compat.patching import variables

_P = ParamSpec('_P')
_T = TypeVar('_T')

#: What to do if control flow or a number depends on the inputs; without a period.
ADVICE = ('Use F.where instead of if, use arrays or variables instead of numbers, or use call= to '
          'convert a function without this code')


class ConversionError(ValueError):
    """Raised if a model cannot be converted. No file has been written.

    The message gives the function, the link that called it, and the line in the user's script.
    """


def name_of_kind(value: object) -> str:
    """Return the name of an object's class as users write it, such as ``torch.optim.Adam``."""
    kind = type(value)
    if kind.__qualname__.endswith('.GraphModuleImpl'):  # each GraphModule has its own class
        kind = kind.__mro__[1]
    if kind.__module__ == 'builtins':
        return kind.__name__
    parts = kind.__module__.split('.')
    modules = ['.'.join(parts[:n + 1]) for n in range(len(parts))]
    return next((f'{module}.{kind.__name__}' for module in modules if getattr(
        sys.modules.get(module), kind.__name__, None) is kind), kind.__qualname__)


def is_library(module: str) -> bool:
    """Return whether a module belongs to a library rather than to user code."""
    return module.partition('.')[0] in (
        'chainer', 'chainer_compat', 'chainermn', 'numpy')


def showing_user_code(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function so that the traceback of a ConversionError shows only user code.

    As in ChainerMN, ``CHAINERMN_DEBUG=1`` shows all frames.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwds: _P.kwargs) -> _T:
        try:
            return function(*args, **kwds)
        except ConversionError as error:
            if variables.flag('CHAINERMN_DEBUG', False):
                raise
            error.__traceback__ = _without_libraries(error.__traceback__)
            raise error

    return call


def _without_libraries(tb: TracebackType | None) -> TracebackType | None:
    if tb is None:
        return None
    rest = _without_libraries(tb.tb_next)
    module = tb.tb_frame.f_globals.get('__name__', '')
    if is_library(module) or module == contextlib.__name__:
        return rest
    return TracebackType(rest, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
