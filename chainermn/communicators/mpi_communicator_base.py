"""The base class of MPI-based communicators: ranks, groups, configuration and all operations."""
from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

from chainermn._collectives import arrays, models, objects, rank_info, reductions
from chainermn._collectives.context import Context, MpiCommunicator
from chainermn._collectives.operation import operation
from chainermn._consistency.consistency_check import CalledBy
from chainermn._diagnostics import flight_recorder, timeouts, unusable, watchdog
from chainermn._diagnostics.flight_recorder import FlightRecord
from chainermn._diagnostics.unusable import Unusable
from chainermn._operations import call_signature
from chainermn._operations.call import entered
from chainermn._operations.call_signature import NO_UPDATE, Caller, Update, pack
from chainermn._process import environment
from chainermn._process.mpi import MPI
from chainermn._timeline import recorder
from chainermn._transport import lifetime
from chainermn._transport.mpi_transport import MpiTransport
from chainermn._types import Array
from chainermn.communicators import _version7
from chainermn.communicators._channel import Channel, with_overridden
from chainermn.communicators._mpi_channel import MpiChannel
from chainermn.communicators._version7 import checked_members
from chainermn.communicators.communicator_base import CommunicatorBase

if TYPE_CHECKING:
    from typing_extensions import Self

    from chainermn._collectives.rpc import Service
    from chainermn._gradients.mean_queue import MeanQueue
    from chainermn._gradients.nccl_mean_queue import NcclMeanQueue

_INT_MAX = 2**31 - 1  # the largest int in C
_BARRIER = pack('barrier')


class MpiCommunicatorBase(CommunicatorBase):
    """Implements all operations of :class:`chainermn.CommunicatorBase` with MPI.

    Collective: every rank creates one. A subclass selects a transport, or defines
    ``multi_node_mean_grad(self, model, zero_fill=False)`` to average gradients in its own way.
    If a subclass overrides a method of ChainerMN 7, such as ``gather_obj``, operations that
    version 7 does not have, such as ``allgather_obj``, call that method.
    ``split`` creates communicators of the same class, so ``mpi_comm`` must be the only argument
    without a default.

    Args:
        mpi_comm: ``mpi4py.MPI.Intracomm``. ChainerMN uses duplicates of it, so its messages cannot
            be confused with yours.

    Attributes:
        transport_class: The class that transfers arrays and averages gradients, such as
            :class:`chainermn.communicators.transport.MpiTransport`.

    Example:
        >>> from mpi4py import MPI
        >>> from chainermn.communicators import mpi_communicator_base, transport
        >>> class MyCommunicator(mpi_communicator_base.MpiCommunicatorBase):
        ...     transport_class = transport.MpiTransport
        >>> MyCommunicator(MPI.COMM_WORLD)
        <MyCommunicator: rank 0 of 2, on node 0 of 1 as rank 0 of 2>
    """

    transport_class: ClassVar[type[MpiTransport]] = MpiTransport

    _context: Context

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        super().__init__()
        _use_defaults(type(self))
        environment.check_flags()
        timeouts.check_environment()
        self._mpi_comm = mpi_comm
        self._rank = mpi_comm.rank
        self._size = mpi_comm.size
        context = Context(mpi_comm, rank_info.of_ranks(mpi_comm), type(self).transport_class)
        self._context = context
        self._topology, self._group, self._tracer = context.topology, context.group, context.tracer
        with self.config_scope():
            self.batched_copy = False
            self.timeout = None
        unusable.register(self)

    # --- ranks -------------------------------------------------------------------------------

    @property
    def mpi_comm(self) -> MPI.Intracomm:
        """The mpi4py communicator that was passed, for your own messages."""
        return self._mpi_comm

    @mpi_comm.setter
    def mpi_comm(self, value: MPI.Intracomm) -> None:
        if value != self._mpi_comm:
            raise AttributeError(
                f'the mpi_comm of a {type(self).__name__} cannot be replaced. Call split(), or '
                f'create another {type(self).__name__} with the new mpi_comm.')

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def intra_rank(self) -> int:
        return self._topology.intra_rank

    @property
    def intra_size(self) -> int:
        return self._topology.intra_size

    @property
    def inter_rank(self) -> int:
        return self._topology.inter_rank

    @property
    def inter_size(self) -> int:
        return self._topology.inter_size

    @property
    def batched_copy(self) -> bool:
        """Whether gradients on a device are packed by a single kernel."""
        return self._group.batched_copy

    @batched_copy.setter
    def batched_copy(self, value: bool) -> None:
        self._group.batched_copy = value

    # --- timeout -----------------------------------------------------------------------------

    def _flight_records(self) -> tuple[FlightRecord, ...]:
        """Return the flight records of this communicator."""
        return self._context.flight_records()

    _n_calls_of_program = staticmethod(flight_recorder.n_calls_of_program)

    @property
    def timeout(self) -> float | None:
        """The timeout of an operation in seconds; ``None`` uses ``CHAINERMN_TIMEOUT``."""
        return self._context.check.record.timeout

    @timeout.setter
    def timeout(self, value: float | None) -> None:
        for record in self._flight_records():
            record.timeout = value

    def set_config(self, name: str, value: Any = True, **kwargs: Any) -> None:
        if name != 'timeout' or kwargs:
            super().set_config(name, value, **kwargs)
            return
        limit = None if value is None else timeouts.parse(value)
        watchdog.get().limit_interval(limit)
        with self.config_scope():
            self.timeout = limit

    def span(self, name: str) -> AbstractContextManager[object]:
        return recorder.span(name)

    # --- groups ------------------------------------------------------------------------------

    @operation
    def split(self, color: int, key: int) -> Self:
        try:
            color, key = operator.index(color), operator.index(key)
        except TypeError:
            raise TypeError(f'color and key must be integers, not {color!r} and {key!r}; for a '
                            'communicator of some ranks only, use new_group(ranks), which returns '
                            'None on the other ranks') from None
        if not (0 <= color <= _INT_MAX and -_INT_MAX <= key <= _INT_MAX):
            raise ValueError(f'color must be from 0 to {_INT_MAX} and key from -{_INT_MAX} to '
                             f'{_INT_MAX}, not {color} and {key}' + (
                                 '; MPI.UNDEFINED is not supported as a color; use '
                                 'new_group(ranks)'
                                 if color == MPI.UNDEFINED else ''))
        self._context.check.same(pack('split'))
        with lifetime.limit_errors(self._context.mpi_comm):
            mpi_comm = self._context.mpi_comm.Split(color, key)
        return self._like_this(mpi_comm)

    @operation
    def new_group(self, ranks: Sequence[int]) -> Self | None:
        members = checked_members(ranks, self._size)
        self._context.check.same(pack('new_group', number=call_signature.digest(members)),
                             {'ranks': str(members)})
        is_member = self._rank in members
        with lifetime.limit_errors(self._context.mpi_comm):
            mpi_comm = self._context.mpi_comm.Split(0 if is_member else MPI.UNDEFINED,
                                          members.index(self._rank) if is_member else 0)
        return self._like_this(mpi_comm) if is_member else None

    @operation
    def barrier(self) -> None:
        self._context.check.same(_BARRIER)  # which waits for all ranks

    @operation
    def serve(self, answer: Callable[[int, Any], Sequence[Any]]) -> Service:
        # Imported here, because only key-value stores need it.
        from chainermn._collectives.rpc import Service, check_service

        check_service(answer)
        self._context.check.same(pack('serve'))
        service = Service(self._context.mpi_comm.Dup(), answer)
        if self._tracer is not None:
            service._tracer = self._tracer.of_service()
        return service

    # --- messages, collectives and models: functions from _collectives -----------------------

    send = arrays.send
    recv = arrays.recv
    isend = arrays.isend
    irecv = arrays.irecv
    waitall = arrays.waitall
    bcast = arrays.bcast
    gather = arrays.gather
    allgather = arrays.allgather
    alltoall = arrays.alltoall
    scatter = arrays.scatter

    allreduce = reductions.allreduce
    allreduce_many = reductions.allreduce_many
    reduce = reductions.reduce
    reduce_scatter = reductions.reduce_scatter
    multi_node_mean = reductions.multi_node_mean

    send_obj = objects.send_obj
    recv_obj = objects.recv_obj
    bcast_obj = objects.bcast_obj
    gather_obj = objects.gather_obj
    allgather_obj = objects.allgather_obj
    scatter_obj = objects.scatter_obj
    allreduce_obj = objects.allreduce_obj

    bcast_data = models.bcast_data
    multi_node_mean_grad = models.multi_node_mean_grad
    check_replicas = models.check_replicas

    def _multi_node_mean(self, sendbuf: Array | None, recvbuf: Array) -> None:
        """Average an array, for code from ChainerMN 7 such as copies of its batch normalization."""
        recvbuf[...] = self.multi_node_mean(recvbuf if sendbuf is None else sendbuf)

    @operation
    def mean_queue(self) -> MeanQueue | NcclMeanQueue:
        if _version7.overrides(type(self), 'multi_node_mean_grad'):
            CommunicatorBase.mean_queue(self)  # raises
        return models.mean_queue(self)

    # --- errors, callers and the interface for optimizers ------------------------------------

    @entered('refuse')
    def refuse(self, operation: str, error: Exception) -> NoReturn:
        self._context.check.refuse(operation, error)

    def called_by(self, caller: Caller | str, update: Update = NO_UPDATE) -> CalledBy:
        return CalledBy(
            self._context.check, _named(caller) if isinstance(caller, str) else caller, update)

    @property
    def _chainermn_channel(self) -> Channel:
        return with_overridden(MpiChannel(self), self, type(self))

    def _new_mean_queue(self, mpi_comm: MPI.Intracomm, background: MpiCommunicator
                        ) -> MeanQueue | NcclMeanQueue:
        return models.new_mean_queue(self, mpi_comm, background)

    # --- copies and finalization -------------------------------------------------------------

    def _like_this(self, mpi_comm: MPI.Comm) -> Self:
        comm = type(self)(cast(MPI.Intracomm, mpi_comm))
        comm._context.free_later(mpi_comm.Free)
        self._configure(comm)
        return comm

    def _configure(self, other: MpiCommunicator) -> None:
        other = cast(MpiCommunicatorBase, other)
        if other._configs == self._configs:
            return
        with other.config_scope():
            for name, value in self._configs.items():
                setattr(other, name, value)

    def finalize(self) -> None:
        if not isinstance(self._context, Unusable):
            self._finalize()

    @operation('finalize')
    def _finalize(self) -> None:
        context = self._context
        if pending := context.messages.receiving():
            raise RuntimeError(f'this rank has incomplete requests: {len(pending)}, such as '
                               f'{pending[0]}. Call wait() on each of them before finalize().')
        context.check.same(pack('finalize'))
        context.check.on_shutdown()
        context.free()
        unusable.deregister(self)
        self._make_unusable(Unusable('this communicator was finalized; create a new one with '
                                     'chainermn.create_communicator'))

    def _make_unusable(self, unusable: Unusable) -> None:
        """Make every later operation raise an error."""
        self._context = cast(Context, unusable)


_named = functools.lru_cache(maxsize=None)(Caller)


def _use_defaults(cls: type[MpiCommunicatorBase]) -> None:
    """Make operations that version 7 does not have call the methods that a class overrides."""
    # Do this when an instance is created, because methods may be added to the class until then.
    # mean_queue checks this itself.
    for name in _version7.CALLED.keys() - {'mean_queue'}:
        if _version7.needs_default(cls, name):
            setattr(cls, name, getattr(CommunicatorBase, name))
