"""What all families of operations have in common."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

from chainermn._consistency.check import Agreement

_Method = TypeVar('_Method', bound=Callable[..., Any])


def collective(method: _Method) -> _Method:
    """Notes whether a rank leaves an operation before that is complete.

    It may do so by sys.exit in a signal handler, for instance.  The others wait for it there.
    """
    @functools.wraps(method)
    def operation(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (SystemExit, KeyboardInterrupt):
            calls = self.recent_calls()[0]
            calls.left = calls.count
            raise

    return cast(_Method, operation)


class Operations:
    """What each family of operations needs of its communicator."""

    _agreement: Agreement
    _arrays: Any
    _rank: int
    _size: int

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def refuse(self, verb: str, error: Exception) -> NoReturn:
        self._agreement.refuse(verb, error)
