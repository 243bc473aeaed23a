"""Recognizes communicators by their methods, not by their class."""
from __future__ import annotations

import inspect
from typing import Any, cast

from chainermn._types import Object
from chainermn.communicators import _version7
from chainermn.communicators._channel import Channel, with_overridden
from chainermn.communicators.communicator_base import CommunicatorBase

#: Operations that only ChainerMN communicators have; mpi4py uses different names.
_OPERATIONS = 'bcast_obj', 'gather_obj', 'allreduce_obj', 'allgather_obj'


def is_communicator(value: object) -> bool:
    """Return whether an object is a communicator, or has a communicator's methods."""
    return isinstance(value, (CommunicatorBase, _Completed)) or (
        not isinstance(value, type) and hasattr(value, 'rank') and hasattr(value, 'size')
        and any(hasattr(value, name) for name in _OPERATIONS))


def as_communicator(value: object, operation: str) -> CommunicatorBase:
    """Return a communicator with all operations.

    Args:
        value: A communicator, or an object with the methods of ChainerMN 7's communicators, such as
            a proxy.
        operation: Name of the caller, for the error message. If the caller has several arguments,
            include them: ``'n_examples(train, communicator)'``.

    Returns:
        ``value`` if it is derived from CommunicatorBase. Otherwise, an object that forwards to
        ``value`` and has default implementations of the missing operations.

    Raises:
        TypeError: If ``value`` is not a communicator.

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
                        f'{order}Create a communicator with chainermn.create_communicator().')
    named = type(type(value).__name__, (_Completed,), {})  # errors show the name
    return cast(CommunicatorBase, named(value))


def overrides(comm: CommunicatorBase, name: str) -> bool:
    """Return whether a communicator has a method of this name that is not from this package."""
    actual: object = comm._actual if isinstance(comm, _Completed) else comm
    return _version7.overrides(type(actual), name)


class _Completed:
    """Forwards to an object, and adds the operations of CommunicatorBase that it does not have."""

    def __init__(self, actual: Object) -> None:
        self.__dict__['_actual'] = actual

    def __getattr__(self, name: str) -> Any:  # only called for attributes that are not found
        if name == '_actual':  # not set yet, while this object is unpickled
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
