"""An error of one rank is raised on all ranks."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn, Protocol


class Refuser(Protocol):
    """A communicator, or another object with its ``refuse``."""

    def refuse(self, operation: str, error: Exception) -> NoReturn:
        """Raises an error on all ranks."""


@contextlib.contextmanager
def raise_on_all_ranks(comm: Refuser, operation: str) -> Iterator[None]:
    """Raises an error of the block on all ranks: on the others in their next collective operation.

    The block must not call a collective operation.

    Args:
        comm: ChainerMN communicator, or the backend of a KVStore.
        operation: Name of the operation, for the error.

    Raises:
        Exception: The error of the block.
    """
    try:
        yield
    except Exception as error:
        comm.refuse(operation, error)
