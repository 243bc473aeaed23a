"""Frees unreferenced communicators when the next one is created.

MPI is limited to about 2,000 communicators, and freeing one is collective, so a garbage collector
cannot do it. Each rank records which of its communicators are unreferenced. When a communicator
is created, its ranks compare these records and free communicators unreferenced on all their ranks.
"""
from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from chainermn._diagnostics.flight_recorder import Key, MessageRecord
from chainermn._process import runtime
from chainermn._process.mpi import MPI

#: Garbage is collected once this many more communicators are held than before.
_COLLECT_EVERY = 16


class _Resources(NamedTuple):
    """The resources of a communicator."""

    free: list[Callable[[], object]]  # collective
    pending: Callable[[], Sequence[str]]  # the messages that may still be in flight
    messages: MessageRecord  # other ranks may wait for them: kept for the deadlock detector


class _Communicators(runtime.ProcessState):
    """The communicators of this process."""

    def __init__(self) -> None:
        self.held: dict[Key, _Resources] = {}
        self.unreferenced: set[Key] = set()
        self.collect_at = _COLLECT_EVERY  # number of held communicators


def hold(owner: object, key: Key, free: list[Callable[[], object]],
         pending: Callable[[], Sequence[str]], messages: MessageRecord) -> None:
    """Record the resources to free once ``owner``, a part of a communicator, is unreferenced.

    Args:
        owner: Must not be reachable from the other arguments.
        key: The key of the communicator.
        free: Called in this order, on all ranks; the list may still grow.
        pending: Returns the messages that must be received before the communicator is freed.
        messages: Its flight record of messages.
    """
    communicators = runtime.get(_Communicators)
    communicators.held[key] = _Resources(free, pending, messages)
    weakref.finalize(owner, communicators.unreferenced.add, key).atexit = False


def release(key: Key) -> None:
    """Undo :func:`hold`, for a finalized communicator."""
    runtime.get(_Communicators).held.pop(key, None)


def unreferenced(ranks: Sequence[int]) -> set[Key]:
    """Return the communicators within these ranks that are unreferenced on this rank.

    Args:
        ranks: Ranks in COMM_WORLD, which will create a communicator.
    """
    communicators = runtime.get(_Communicators)
    held, dropped = communicators.held, communicators.unreferenced
    if len(held) >= communicators.collect_at:
        gc.collect()
        communicators.collect_at = len(held) + _COLLECT_EVERY
    if not dropped:
        return set()
    return {key for key in dropped & held.keys() if set(key[1]) <= set(ranks)
            and not held[key].pending()}


def free(ranks: Sequence[int], rank: int, by_rank: Sequence[set[Key]]) -> None:
    """Free the communicators that are unreferenced on all of their ranks.

    Collective: every rank calls it.

    Args:
        ranks: Ranks in COMM_WORLD.
        rank: The index of this rank.
        by_rank: What :func:`unreferenced` returned on each of them.
    """
    communicators = runtime.get(_Communicators)
    # A constructor may have created another communicator since, which has freed some.
    for key in sorted(by_rank[rank] & communicators.held.keys()):
        of_key = set(key[1])
        if all(key in dropped for each, dropped in zip(ranks, by_rank, strict=True)
               if each in of_key):
            for release_part in communicators.held.pop(key).free:
                release_part()
            communicators.unreferenced.discard(key)
    communicators.collect_at = min(
        communicators.collect_at, len(communicators.held) + _COLLECT_EVERY)


def duplicates(mpi_comm: MPI.Intracomm) -> tuple[MPI.Intracomm, MPI.Intracomm]:
    """Duplicate a communicator twice. Collective: every rank calls it.

    Raises:
        RuntimeError: On all ranks, if the limit of MPI is reached.
    """
    with limit_errors(mpi_comm):
        first = mpi_comm.Dup()
        try:
            return first, mpi_comm.Dup()
        except MPI.Exception:
            first.Free()
            raise


@contextlib.contextmanager
def limit_errors(mpi_comm: MPI.Intracomm) -> Iterator[None]:
    """Explain the error if the limit of MPI is reached, which MPI raises on all ranks."""
    try:
        yield
    except MPI.Exception as error:
        counts = mpi_comm.allgather(len(runtime.get(_Communicators).held))
        raise RuntimeError(
            f'MPI cannot create another communicator; ChainerMN holds {counts} (by rank). Call '
            'finalize() on unused communicators, on all of their ranks, or drop all references '
            'to them.'
        ) from error
