"""Frees unreferenced communicators when the next one is created.

MPI is limited to about 2,000 communicators, and freeing one is collective, so the garbage collector
cannot do it. Each rank records which of its communicators are unreferenced. When a communicator is
created, its ranks compare these records and free the communicators that are unreferenced on all of
their ranks.
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

#: Garbage is collected once this many more communicators are open than after the last collection.
_COLLECT_EVERY = 16


class _Resources(NamedTuple):
    """The resources of a communicator."""

    free: list[Callable[[], object]]  # collective
    pending: Callable[[], Sequence[str]]  # the messages that may still be in flight
    messages: MessageRecord  # for the deadlock detector: other ranks may wait for them


class _Communicators(runtime.ProcessState):
    """The communicators of this process."""

    def __init__(self) -> None:
        self.held: dict[Key, _Resources] = {}
        self.unreferenced: set[Key] = set()
        self.collect_at = _COLLECT_EVERY  # number of open communicators


def hold(owner: object, key: Key, free: list[Callable[[], object]],
         pending: Callable[[], Sequence[str]], messages: MessageRecord) -> None:
    """Record the resources to free once ``owner``, a part of a communicator, is unreferenced.

    Args:
        owner: The part of the communicator. It must not be reachable from the other arguments.
        key: The key of the communicator.
        free: Functions that are called in this order, on all ranks. The list may still grow.
        pending: Function that returns the messages that must be received before the communicator
            is freed.
        messages: The communicator's flight record of messages.
    """
    communicators = runtime.get(_Communicators)
    communicators.held[key] = _Resources(free, pending, messages)
    weakref.finalize(owner, communicators.unreferenced.add, key).atexit = False


def release(key: Key) -> None:
    """Undo :func:`hold`, for a finalized communicator."""
    runtime.get(_Communicators).held.pop(key, None)


def unreferenced(ranks: Sequence[int]) -> set[Key]:
    """Return the unreferenced communicators of this rank whose ranks are all in ``ranks``.

    Args:
        ranks: The ranks in COMM_WORLD that are about to create a communicator.
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
        ranks: The ranks in COMM_WORLD.
        rank: The index of this rank in ``ranks``.
        by_rank: The result of :func:`unreferenced` on each rank.
    """
    communicators = runtime.get(_Communicators)
    # Skip communicators that have been freed since `by_rank` was computed: a constructor may have
    # created another communicator, which frees unreferenced ones.
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
    """Explain the error that MPI raises on all ranks when its limit is reached."""
    try:
        yield
    except MPI.Exception as error:
        counts = mpi_comm.allgather(len(runtime.get(_Communicators).held))
        raise RuntimeError(
            f'MPI cannot create another communicator. ChainerMN has {counts} open communicators '
            '(listed by rank). Call finalize() on unused communicators, on all of their ranks, or '
            'drop all references to them.'
        ) from error
