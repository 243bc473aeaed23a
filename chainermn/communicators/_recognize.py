"""Recognize communicators by their methods, not by their class."""
from __future__ import annotations

import inspect
from typing import Any, cast

from chainermn._types import Object
from chainermn.communicators import _version7
from chainermn.communicators._channel import Channel, with_overridden
from chainermn.communicators.communicator_base import CommunicatorBase

#: Operations that only communicators have; mpi4py's have other names.
_OPERATIONS = 'bcast_obj', 'gather_obj', 'allreduce_obj', 'allgather_obj'


def is_communicator(value: object) -> bool:
    """Return whether an object is a communicator, a proxy of one, or like one."""
    return isinstance(value, (CommunicatorBase, _Completed)) or (
        not isinstance(value, type) and hasattr(value, 'rank') and hasattr(value, 'size')
        and any(hasattr(value, name) for name in _OPERATIONS))


def as_communicator(value: object, operation: str) -> CommunicatorBase:
    """Return a communicator with all operations.

    Args:
        value: A communicator, or an object with methods of ChainerMN 7's communicators, such as a
            proxy.
        operation: The name of the caller, for the error; with its arguments if it has several,
            such as ``'n_examples(train, communicator)'``.

    Returns:
        ``value``; if it is not derived from CommunicatorBase, an object that forwards to it and has
        the defaults of the operations that it lacks.

    Raises:
        TypeError: If it is not a communicator.

    Example:
        >>> from chainermn.communicators import as_communicator
        >>> def n_examples(communicator, examples):
        ...     communicator = as_communicator(communicator, 'n_examples')
        ...     return communicator.allreduce_obj(len(examples))
        >>> n_examples(comm, train)
        8
    """
    if isinstance(value, CommunicatorBase):
        return value
    if isinstance(value, _Completed):
        return cast(CommunicatorBase, value)
    if not is_communicator(value):
        order = 'Check the order of the arguments. ' if ', ' in operation else ''
        raise TypeError(f'{operation} needs a ChainerMN communicator, not {type(value).__name__}. '
                        f'{order}Create one with chainermn.create_communicator().')
    named = type(type(value).__name__, (_Completed,), {})  # errors show the name
    return cast(CommunicatorBase, named(value))


def overrides(comm: CommunicatorBase, name: str) -> bool:
    """Return whether a communicator of the program has its own method of this name."""
    actual: object = comm._actual if isinstance(comm, _Completed) else comm
    return _version7.overrides(type(actual), name)


class _Completed:
    """Forwards to an object; has CommunicatorBase's operations where the object has none."""

    def __init__(self, actual: Object) -> None:
        self.__dict__['_actual'] = actual

    def __getattr__(self, name: str) -> Any:  # only for names that it does not have itself
        if name == '_actual':  # not yet, while it is unpickled
            raise AttributeError(name)
        try:
            if not _version7.needs_default(type(self._actual), name):
                return getattr(self._actual, name)
            raise AttributeError(name)
        except AttributeError:
            default = inspect.getattr_static(CommunicatorBase, name, None)
            if default is None or name.startswith('__') or getattr(
                    default, '__isabstractmethod__', False):
                raise
            return default.__get__(self, type(self))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._actual, name, value)

    def __deepcopy__(self, memo: dict[int, object]) -> _Completed:
        return self

    def __repr__(self) -> str:
        return repr(self._actual)

    @property
    def _chainermn_channel(self) -> Channel:
        own = getattr(self._actual, '_chainermn_channel', None)
        comm = cast(CommunicatorBase, self)
        return with_overridden(
            Channel(comm) if own is None else own, comm, type(self._actual))

    def split(self, color: int, key: int) -> CommunicatorBase:
        return as_communicator(self._actual.split(color, key), 'split')
