"""Communicators that no rank refers to any more are freed when the next one is created.

MPI can hold about 2,000 communicators, and freeing one is collective: the garbage collectors of the
ranks cannot do it alone.  So each rank notes which of its communicators are gone, and whenever a
communicator is created its ranks compare their notes and free what is gone on all of them.
"""
from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from mpi4py import MPI

from chainermn._diagnostics.flight_recorder import Key
from chainermn._transport.pending import Pending

#: Reference cycles are collected whenever there are this many more communicators.
_COLLECT_EVERY = 16


class _Held(NamedTuple):
    """What a communicator holds."""

    free: list[Callable[[], Any]]  # collective
    pending: Pending  # messages that may still be in flight


_held: dict[Key, _Held] = {}
_gone: set[Key] = set()


def hold(owner: object, key: Key, free: list[Callable[[], Any]], pending: Pending) -> None:
    """Notes what to free once nobody refers to ``owner``, a part of a communicator.

    Args:
        owner: It must not be reachable from the other arguments.
        key: Of the communicator.
        free: Called in this order, on all ranks; the list may still grow.
        pending: Messages that keep the communicator until they are received.
    """
    _held[key] = _Held(free, pending)
    weakref.finalize(owner, _gone.add, key).atexit = False


def release(key: Key) -> None:
    """Undoes :func:`hold`, for a communicator that was finalized."""
    _held.pop(key, None)


def free_unreferenced(mpi_comm: MPI.Intracomm, ranks: tuple[int, ...]) -> None:
    """Frees communicators of some of these ranks that are gone on all of theirs.

    Collective: every rank of ``mpi_comm`` calls it.

    Args:
        mpi_comm: The communicator of which a new one will be made.
        ranks: Its ranks, as COMM_WORLD numbers them.
    """
    if len(_held) % _COLLECT_EVERY == _COLLECT_EVERY - 1:
        gc.collect()
    mine = {key for key in _gone & _held.keys() if set(key[1]) <= set(ranks)
            and not _held[key].pending.calls()}
    gone = dict(zip(ranks, mpi_comm.allgather(mine), strict=True))
    for key in sorted(mine):
        if all(key in gone[rank] for rank in key[1]):
            for free in _held.pop(key).free:
                free()
            _gone.discard(key)


def duplicates(mpi_comm: MPI.Intracomm) -> tuple[MPI.Intracomm, MPI.Intracomm]:
    """Duplicates a communicator twice.  Collective: every rank calls it.

    Raises:
        RuntimeError: On all ranks, if MPI can hold no more communicators.
    """
    with explained(mpi_comm):
        first = mpi_comm.Dup()
        try:
            return first, mpi_comm.Dup()
        except MPI.Exception:
            first.Free()
            raise


@contextlib.contextmanager
def explained(mpi_comm: MPI.Intracomm) -> Iterator[None]:
    """Says what to do where MPI can hold no more communicators.

    MPI fails on all ranks alike then.
    """
    try:
        yield
    except MPI.Exception as error:
        counts = mpi_comm.allgather(len(_held))
        raise RuntimeError(
            f'MPI cannot create another communicator; {counts} of ChainerMN exist, by rank.  Call '
            'finalize() on those that are no longer needed, on all of their ranks, or drop all '
            'references to them.'
        ) from error
