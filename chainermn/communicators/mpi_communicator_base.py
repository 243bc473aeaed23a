"""The base class of communicators on MPI: ranks, groups, configuration and all operations."""
from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from chainermn._collectives import tracer
from chainermn._collectives.activations import Activations
from chainermn._collectives.models import ModelOperations
from chainermn._collectives.operation import operation
from chainermn._collectives.point_to_point import Messages
from chainermn._collectives.reductions import ReductionOperations
from chainermn._collectives.rpc import Service, check_service
from chainermn._consistency.consistency_check import ConsistencyCheck
from chainermn._diagnostics import flight_recorder, lifecycle, timeouts, unusable, watchdog
from chainermn._diagnostics.flight_recorder import FlightRecord
from chainermn._diagnostics.unusable import Unusable
from chainermn._operations import call_signature
from chainermn._operations.call_signature import pack
from chainermn._operations.table import END
from chainermn._process import environment
from chainermn._process.mpi import MPI
from chainermn._timeline import recorder
from chainermn._transport import lifetime, topology
from chainermn._transport.base import Group, Prepare
from chainermn._transport.mpi_transport import MpiTransport
from chainermn.communicators import _introduction, _version7
from chainermn.communicators._version7 import checked_members
from chainermn.communicators.communicator_base import CommunicatorBase

if TYPE_CHECKING:
    from typing_extensions import Self

_T = TypeVar('_T')

_INT_MAX = 2**31 - 1  # of a C int
_BARRIER = pack('barrier')


class MpiCommunicatorBase(ReductionOperations, ModelOperations, CommunicatorBase):
    """All operations of :class:`chainermn.CommunicatorBase` on MPI.

    Collective: every rank creates one.  A subclass names a transport, or defines
    ``multi_node_mean_grad(self, model, zero_fill=False)`` to average gradients in its own way.
    If a subclass overrides a method that ChainerMN 7 has, such as ``gather_obj``, the operations
    that version 7 lacks, such as ``allgather_obj``, call that method.
    ``split`` creates communicators of the same class, so ``mpi_comm`` must be the only argument
    without a default.

    Args:
        mpi_comm: ``mpi4py.MPI.Intracomm``.  ChainerMN communicates on duplicates of it, which your
            own messages cannot reach.

    Attributes:
        transport_class: Moves arrays and averages gradients: a class like
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

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        super().__init__()
        _use_defaults(type(self))
        timeouts.check_environment()
        self._mpi_comm = mpi_comm
        self._rank = mpi_comm.rank
        self._size = mpi_comm.size
        introductions = _introduction.take(mpi_comm)
        tracer.check_all_on([each.has_timeline for each in introductions])
        lifecycle.wait_until_ready()  # before collectives of all ranks
        lifetime.free(flight_recorder.world_ranks(mpi_comm), self._rank,
                      [each.unreferenced for each in introductions])
        signatures, self._arrays = lifetime.duplicates(mpi_comm)
        self._consistency = ConsistencyCheck(signatures)
        lifecycle.add_check(self._consistency)
        # MPI keeps collectives and messages of one communicator apart.
        self._messages = Messages(self._arrays, signatures)
        self._activations = Activations(self._messages)
        self._consistency.on_shutdown = _while_alive(self._messages.warn_of_unmatched)
        flight_recorder.assign_number(self._flight_records())
        self._sums = {}
        self._has_debug_variable = environment.flag(environment.DEBUG)
        self._to_free: list[Callable[[], Any]] = [
            functools.partial(lifecycle.remove_check, self._consistency),
            signatures.Free, self._arrays.Free]
        lifetime.hold(self._messages, self._consistency.calls.key, self._to_free,
                       self._messages.pending)
        self._topology = topology.of(self._rank, [each.place for each in introductions])
        self._group = Group(self._arrays, self._topology,
                            weakref.ref(self._consistency.calls),
                            prepared=_prepared_by(self._consistency))
        self._mpi_transport = MpiTransport(self._group)
        self._transport = type(self).transport_class(self._group)
        self._to_free.append(self._transport.free)
        with self.config_scope():
            self.batched_copy = False
            self.timeout = None
        if recorder.is_on():
            self._tracer = tracer.begin(self._arrays, self._consistency.calls)
            self._consistency.trace()
        unusable.register(self)

    # --- ranks -------------------------------------------------------------------------------

    @property
    def mpi_comm(self) -> MPI.Intracomm:
        """The mpi4py communicator that was passed, for the user's own messages."""
        return self._mpi_comm

    @mpi_comm.setter
    def mpi_comm(self, value: MPI.Intracomm) -> None:
        if value != self._mpi_comm:
            raise AttributeError(
                f'the mpi_comm of a {type(self).__name__} cannot be replaced. Call split(), or '
                f'create another {type(self).__name__} from it.')

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
        return self._consistency.calls, self._messages.calls

    _n_calls_of_program = staticmethod(flight_recorder.n_calls_of_program)

    @property
    def timeout(self) -> float | None:
        """The timeout of an operation in seconds; ``None`` uses ``CHAINERMN_TIMEOUT``."""
        return self._consistency.calls.timeout

    @timeout.setter
    def timeout(self, value: float | None) -> None:
        for calls in self._flight_records():
            calls.timeout = value

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
                            'None on the others') from None
        if not (0 <= color <= _INT_MAX and -_INT_MAX <= key <= _INT_MAX):
            raise ValueError(f'color must be from 0 to {_INT_MAX} and key from -{_INT_MAX} to '
                             f'{_INT_MAX}, not {color} and {key}' + (
                                 '; MPI.UNDEFINED is not supported as a color; use '
                                 'new_group(ranks)'
                                 if color == MPI.UNDEFINED else ''))
        self._consistency.same(pack('split'))
        with lifetime.explained(self._arrays):
            mpi_comm = self._arrays.Split(color, key)
        return self._like_this(mpi_comm)

    @operation
    def new_group(self, ranks: Sequence[int]) -> Self | None:
        members = checked_members(ranks, self._size)
        self._consistency.same(pack('new_group', number=call_signature.digest(members)),
                             {'ranks': str(members)})
        is_member = self._rank in members
        with lifetime.explained(self._arrays):
            mpi_comm = self._arrays.Split(0 if is_member else MPI.UNDEFINED,
                                          members.index(self._rank) if is_member else 0)
        return self._like_this(mpi_comm) if is_member else None

    def _like_this(self, mpi_comm: MPI.Comm) -> Self:
        comm = type(self)(cast(MPI.Intracomm, mpi_comm))
        comm._to_free.append(mpi_comm.Free)
        self._configure(comm)
        return comm

    def _configure(self, other: ModelOperations) -> None:
        other = cast(MpiCommunicatorBase, other)
        if other._configs == self._configs:
            return
        with other.config_scope():
            for name, value in self._configs.items():
                setattr(other, name, value)

    @operation
    def barrier(self) -> None:
        self._consistency.same(_BARRIER)  # which waits for all ranks

    @operation
    def serve(self, answer: Callable[[int, Any], Sequence[Any]]) -> Service:
        check_service(answer)
        self._consistency.same(pack('serve'))
        service = Service(self._arrays.Dup(), answer)
        if self._tracer is not None:
            service._tracer = self._tracer.of_service()
        return service

    def _share_error(self, operation: str, error: Exception | None) -> None:
        if error is not None:
            self.refuse(operation, error)

    @operation('join')
    def _join_turn(self, number: int) -> tuple[int, ...]:
        messages = self._consistency.gather(pack('join', number=number))
        return tuple(call_signature.unpack(message).number for message in messages)

    def _join_responses(self, error: BaseException) -> tuple[int | None, ...] | None:
        signatures = self._consistency.mismatch_of(error)
        if signatures is None:
            return None
        if any(each.failed or each.operation == END for each in signatures):
            return ()
        return tuple(each.number if each.operation == 'join' else None for each in signatures)

    def finalize(self) -> None:
        if not isinstance(self._arrays, Unusable):
            self._finalize()

    @operation('finalize')
    def _finalize(self) -> None:
        if pending := self._messages.receiving():
            raise RuntimeError(f'{len(pending)} requests are not complete, such as {pending[0]}; '
                               'call wait() on them first')
        self._consistency.same(pack('finalize'))
        self._consistency.on_shutdown()
        if self._mean_queue is not None:
            self._mean_queue.free()
            cast(MpiCommunicatorBase, self._background).finalize()
            self._mean_queue = self._background = None
        lifetime.release(self._consistency.calls.key)
        while self._to_free:
            self._to_free.pop(0)()
        unusable.deregister(self)
        self._make_unusable(Unusable('this communicator was finalized; create a new one with '
                              'chainermn.create_communicator'))

    def _make_unusable(self, unusable: Unusable) -> None:
        """Make every later operation raise an error."""
        for name in ('_consistency', '_arrays', '_messages', '_activations', '_mpi_transport',
                     '_transport'):
            setattr(self, name, unusable)


def _use_defaults(cls: type[MpiCommunicatorBase]) -> None:
    """Make operations that version 7 lacks call the methods that a class overrides."""
    for name in _version7.CALLED:
        if _version7.needs_default(cls, name):  # not before: methods may be added to the class
            setattr(cls, name, getattr(CommunicatorBase, name))


def _prepared_by(check: ConsistencyCheck) -> Prepare:
    """Return its method without keeping the check alive, which has the flight record."""
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
