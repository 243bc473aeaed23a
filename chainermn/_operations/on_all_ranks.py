"""Raises an error of one rank on all ranks; only one rank prints it."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn, Protocol, TypeVar

from chainermn._operations import common_error
from chainermn._operations.ranks import group_lines
from chainermn._types import Object

_E = TypeVar('_E', bound=Exception)


class Ranks(Protocol):
    """A communicator, or the backend of a KVStore."""

    @property
    def rank(self) -> int:
        """The rank of this process."""

    def refuse(self, operation: str, error: Exception) -> NoReturn:
        """Raise an error on all ranks."""


class HasChannel(Protocol):
    """A communicator, including third-party communicators."""

    @property
    def _chainermn_channel(self) -> Object:
        """The channel that shares errors."""


@contextlib.contextmanager
def raise_on_all_ranks(comm: Ranks, operation: str) -> Iterator[None]:
    """Raise an error of the block on all ranks; the others raise it in their next collective.

    Not all ranks need to enter the block. With a third-party communicator, which does not compare
    calls, only this rank raises the error; see :func:`raise_together`.

    The block must not call a collective.

    Args:
        comm: A ChainerMN communicator, or the backend of a KVStore.
        operation: The name of the operation, for the error.

    Raises:
        Exception: The error of the block.

    Example:
        >>> from chainermn.communicators import errors
        >>> def read(comm, text):
        ...     with errors.raise_on_all_ranks(comm, 'read'):
        ...         value = float(text)
        ...     return comm.allreduce_obj(value)
        >>> read(comm, 'abc' if comm.rank == 1 else '1')
        Traceback (most recent call last):
            ...
        ValueError: ...could not convert string to float: 'abc'...
    """
    try:
        yield
    except Exception as error:
        comm.refuse(operation, error)


@contextlib.contextmanager
def raise_together(comm: HasChannel, operation: str) -> Iterator[None]:
    """Raise an error of the block on all ranks. Collective: every rank enters the block.

    Unlike :func:`raise_on_all_ranks`, this function also works with third-party communicators.
    These do not compare calls, so the ranks send each other their errors at the end of the block.

    Args:
        comm: A ChainerMN communicator.
        operation: The name of the operation, for the error.

    Raises:
        Exception: The error of the block, or of the block of another rank.

    Example:
        >>> from chainermn.communicators import errors
        >>> with errors.raise_together(comm, 'check'):
        ...     if len(train) < comm.size:
        ...         raise ValueError('more ranks than examples')
    """
    try:
        yield
    except Exception as error:
        comm._chainermn_channel.share_error(operation, error)
    else:
        comm._chainermn_channel.share_error(operation, None)


def on_all_ranks(comm: Ranks, error: _E) -> _E:
    """Mark an error that all ranks raise, so that only rank 0 prints it, and return it.

    Args:
        comm: The ChainerMN communicator of the ranks that raise the error.
        error: The error, the same on all ranks.
    """
    common_error.mark(error, comm.rank == 0)
    return error


def check_equal(comm: Ranks, values: Sequence[object], problem: str, advice: str) -> None:
    """Raise the same error on all ranks if their values differ.

    Args:
        comm: A ChainerMN communicator.
        values: The value of each rank: a text, or an object that ``str`` converts to one line, or
            a dict of options by name, of which the error shows those that differ. The list must be
            the same on all ranks, like the result of ``allgather_obj``.
        problem: The first line of the error.
        advice: The last line of the error, which says what to do.

    Raises:
        ValueError: On all ranks. It lists the values with their ranks.

    Example:
        >>> from chainermn.communicators import errors
        >>> rates = comm.allgather_obj(0.1 + comm.rank)
        >>> errors.check_equal(comm, rates, 'the learning rate differs', 'Set it on all ranks.')
        Traceback (most recent call last):
            ...
        ValueError: the learning rate differs
          rank 0: 0.1
          rank 1: 1.1
        Set it on all ranks.
    """
    texts = [*map(str, values)]
    if len(set(texts)) > 1:
        options = [value for value in values if isinstance(value, Mapping)]
        if len(options) == len(values):
            texts = _differing(options)
        raise on_all_ranks(comm, ValueError('\n'.join(
            [problem, *group_lines(enumerate(texts)), advice])))


def _differing(options: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the options of each rank that differ, as text."""
    names = [name for name in options[0] if len({str(each.get(name)) for each in options}) > 1]
    return [', '.join([f'{name}={each.get(name)!r}' for name in names]) for each in options]
