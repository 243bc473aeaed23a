"""The introduction: what ranks that create a communicator tell each other, in one exchange."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from chainermn._consistency import mismatch
from chainermn._consistency.mismatch import RemoteError
from chainermn._diagnostics import lifecycle
from chainermn._diagnostics.flight_recorder import Key, world_ranks
from chainermn._diagnostics.node_monitor import Registration
from chainermn._process import runtime
from chainermn._process.mpi import MPI
from chainermn._timeline import recorder
from chainermn._transport import lifetime, topology
from chainermn._transport.topology import Place


class Arguments(NamedTuple):
    """What a rank passes to create_communicator."""

    call: str
    failure: RemoteError | None  # why the call is invalid
    lacks_nccl: str  # why 'auto' cannot use NCCL; '' if it can
    has_torch: bool  # whether PyTorch's kernels compute for Chainer


class Introduction(NamedTuple):
    """What a rank tells the others."""

    place: Place
    has_timeline: bool  # whether it records one
    registration: Registration | None
    unreferenced: set[Key]
    arguments: Arguments | None


class _Introduced(runtime.Part):
    """The introductions of create_communicator, for the communicator that it creates."""

    def __init__(self) -> None:
        self.mpi_comm: MPI.Intracomm | None = None
        self.introductions: list[Introduction] = []


def introduce(mpi_comm: MPI.Intracomm, arguments: Arguments | None = None) -> list[Introduction]:
    """Return the introduction of each rank.  Collective: every rank calls it.

    Then the ranks can report failures, and know when another one has ended.

    Args:
        mpi_comm: The ranks that create a communicator.
        arguments: What this rank passes to create_communicator; ``None`` if it calls a class.

    Raises:
        CollectiveMismatchError: On all ranks, if only some of them call a class.
    """
    registration = lifecycle.prepare(mpi_comm)
    introductions = mpi_comm.allgather(Introduction(
        topology.here(), recorder.is_on(), registration,
        lifetime.unreferenced(world_ranks(mpi_comm)), arguments))
    if registration is not None:
        lifecycle.start(mpi_comm, [each.place.host for each in introductions],
                        [each.registration for each in introductions])
    calls = ['a class of communicators' if each.arguments is None else each.arguments.call
             for each in introductions]
    if len({each.arguments is None for each in introductions}) > 1:
        raise mismatch.calls_differ_error('create_communicator', calls)
    return introductions


@contextlib.contextmanager
def kept(mpi_comm: MPI.Intracomm, introductions: list[Introduction]) -> Iterator[None]:
    """Keep introductions for a communicator that is created in this context."""
    introduced = runtime.get(_Introduced)
    introduced.mpi_comm, introduced.introductions = mpi_comm, introductions
    try:
        yield
    finally:
        introduced.mpi_comm = None


def take(mpi_comm: MPI.Intracomm) -> list[Introduction]:
    """Return the introductions for a new communicator.  Collective: every rank calls it.

    They are exchanged, unless they have been kept.
    """
    introduced = runtime.get(_Introduced)
    if introduced.mpi_comm is not mpi_comm:
        return introduce(mpi_comm)
    introduced.mpi_comm = None
    return introduced.introductions
