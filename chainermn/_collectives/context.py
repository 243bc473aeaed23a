"""The parts of a communicator that its operations share, created and freed in a fixed order."""
from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

import numpy as np

from chainermn._collectives import tracer
from chainermn._collectives.activations import Activations
from chainermn._collectives.point_to_point import Messages
from chainermn._collectives.rank_info import RankInfo
from chainermn._consistency.consistency_check import ConsistencyCheck
from chainermn._consistency.signature_exchange import SPINS, SPINS_IF_OVERSUBSCRIBED
from chainermn._diagnostics import flight_recorder, lifecycle
from chainermn._diagnostics.flight_recorder import FlightRecord
from chainermn._process import environment
from chainermn._process.mpi import MPI
from chainermn._timeline import recorder
from chainermn._transport import lifetime, topology
from chainermn._transport.base import Group, Prepare
from chainermn._transport.mpi_transport import MpiTransport
from chainermn._transport.shared_memory import shared_lines
from chainermn._types import Object

if TYPE_CHECKING:  # imported on first use
    from chainermn._gradients.mean_queue import MeanQueue
    from chainermn._gradients.nccl_mean_queue import NcclMeanQueue

_T = TypeVar('_T')


class MpiCommunicator(Protocol):
    """The members of a communicator that MPI-based operations use."""

    _context: Context

    @property
    def transport_class(self) -> type[MpiTransport]:
        """The class of the transport, which transfers arrays."""

    def allgather_obj(self, obj: Object) -> list[Object]:
        """Gather one object from each rank. Collective: every rank calls it."""

    def refuse(self, operation: str, error: Exception) -> NoReturn:
        """Raise an error on all ranks."""

    def finalize(self) -> None:
        """Free all parts. Collective: every rank calls it."""

    def _like_this(self, mpi_comm: MPI.Comm) -> MpiCommunicator:
        """Create a communicator of the same class and configuration."""

    def _configure(self, other: MpiCommunicator) -> None:
        """Give another communicator the configuration of this one."""

    def _new_mean_queue(self, mpi_comm: MPI.Intracomm, background: MpiCommunicator
                        ) -> MeanQueue | NcclMeanQueue:
        """Create a queue that averages on a background communicator."""


class Context:
    """The parts of an MPI-based communicator. Collective: every rank creates and frees it.

    Args:
        mpi_comm: The mpi4py communicator to duplicate.
        ranks: Information about each rank.
        transport_class: The class of the transport.

    Attributes:
        check: The consistency check, which has the flight record of the collectives.
        mpi_comm: A duplicate of the communicator, for data that no transport carries.
        messages: Point-to-point messages.
        activations: Messages of models that are split between ranks.
        topology: The nodes of the ranks.
        group: The ranks and settings that the transports share.
        transport: The transport, which transfers and averages arrays.
        mpi_transport: The transport for arrays that ``transport`` does not carry.
        tracer: The tracer that records operations on the timeline; ``None`` without a timeline.
        debug: Whether CHAINERMN_DEBUG was set when the communicator was created.
        inline_sums: The signatures of sums whose data is sent inline, by shape and dtype; an empty
            signature for other sums.
        mean_queue: The queue that averages in the background; ``None`` until it is used.
        background: The communicator of the queue; ``None`` until the queue is used.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, ranks: Sequence[RankInfo],
                 transport_class: type[MpiTransport]) -> None:
        self.rank, self.size = mpi_comm.rank, mpi_comm.size
        tracer.check_all_on([each.has_timeline for each in ranks])
        lifecycle.wait_until_ready()  # before the first collectives
        lifetime.free(flight_recorder.world_ranks(mpi_comm), self.rank,
                      [each.unreferenced for each in ranks])
        signatures, self.mpi_comm = lifetime.duplicates(mpi_comm)
        self.topology = topology.of(self.rank, [each.place for each in ranks])
        spins = SPINS_IF_OVERSUBSCRIBED if topology.note_oversubscription(self.topology) else SPINS
        self.check = ConsistencyCheck(
            signatures, shared_lines.create if self.topology.inter_size == 1 else None, spins)
        lifecycle.add_check(self.check)
        # MPI keeps collectives and messages of one communicator apart.
        self.messages = Messages(self.mpi_comm, signatures, spins)
        self.activations = Activations(self.messages)
        self.check.on_shutdown = _while_alive(self.messages.warn_of_unmatched)
        flight_recorder.assign_number(self.flight_records())
        self._to_free: list[Callable[[], object]] = [
            functools.partial(lifecycle.remove_check, self.check), self.check.free,
            signatures.Free, self.mpi_comm.Free]
        lifetime.hold(self.messages, self.check.record.key, self._to_free,
                      self.messages.pending.calls, self.messages.record)
        self.group = Group(self.mpi_comm, signatures, self.topology,
                           weakref.ref(self.check.record), prepared=_prepared_by(self.check))
        self.mpi_transport = MpiTransport(self.group)
        self.transport = transport_class(self.group)
        self._to_free.append(self.transport.free)
        self.debug = environment.flag(environment.DEBUG)
        self.inline_sums: dict[tuple[tuple[int, ...], np.dtype], bytes] = {}
        self.mean_queue: MeanQueue | NcclMeanQueue | None = None
        self.background: MpiCommunicator | None = None
        self.tracer: tracer.Tracer | None = None
        if recorder.is_on():
            self.tracer = tracer.begin(self.mpi_comm, self.check.record)
            self.check.trace()

    def flight_records(self) -> tuple[FlightRecord, ...]:
        """Return the flight records of the collectives and of the messages."""
        return self.check.record, self.messages.record

    def transport_for(self, on_device: bool, homogeneous: bool = True) -> MpiTransport:
        """Select the transport for arrays.

        Args:
            on_device: Whether the arrays of this rank are on a device.
            homogeneous: Whether ``on_device`` is the same on all ranks.
        """
        if homogeneous and self.transport.carries(on_device):
            return self.transport
        return self.mpi_transport

    def free_later(self, free: Callable[[], object]) -> None:
        """Register a collective function to call last when this context is freed."""
        self._to_free.append(free)

    def free_first(self, *free: Callable[[], object]) -> None:
        """Register collective functions to call first, in this order, when this context is freed.

        Args:
            free: The functions. They must not keep the communicator alive; see
                :func:`lifetime.hold`.
        """
        self._to_free[:0] = free

    def free(self) -> None:
        """Free everything. All communication must have ended."""
        lifetime.release(self.check.record.key)
        while self._to_free:
            self._to_free.pop(0)()


def _prepared_by(check: ConsistencyCheck) -> Prepare:
    """Return a function that calls ``check.prepared`` without keeping the check alive."""
    reference = weakref.ref(check)

    def prepared(nbytes: int | None, prepare: Callable[[], _T], /) -> _T:
        check = reference()
        return prepare() if check is None else check.prepared(nbytes, prepare)

    return prepared


def _while_alive(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls a method without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := reference()) is not None:
            alive()

    return call
