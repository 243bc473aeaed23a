"""A communicator on MPI: its ranks, groups of them, and all operations together."""
from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from mpi4py import MPI

from chainermn import _signature
from chainermn._collectives import traced
from chainermn._collectives.activations import Activations
from chainermn._collectives.models import ModelOperations
from chainermn._collectives.operation import collective
from chainermn._collectives.point_to_point import Messages
from chainermn._collectives.reductions import ReductionOperations
from chainermn._collectives.rpc import Service, check_service
from chainermn._consistency.check import Agreement
from chainermn._diagnostics import flight_recorder, shutdown, thread_state, unusable, watchdog
from chainermn._diagnostics.flight_recorder import Calls
from chainermn._diagnostics.unusable import Unusable
from chainermn._signature import pack
from chainermn._tracing import recorder
from chainermn._transport import lifetime, topology
from chainermn._transport.mpi import MpiTransport
from chainermn.communicators.communicator_base import CommunicatorBase

_INT_MAX = 2**31 - 1  # of a C int


class MpiCommunicatorBase(ReductionOperations, ModelOperations, CommunicatorBase):
    """All operations of :class:`chainermn.CommunicatorBase` on MPI.

    Collective: every rank makes one.  A subclass that defines ``multi_node_mean_grad(self, model,
    zero_fill=False)`` averages gradients in its own way; ``split`` gives communicators of its
    class, which therefore has to take ``mpi_comm`` as the only argument that it needs.

    Args:
        mpi_comm: ``mpi4py.MPI.Intracomm``.  Arrays, objects and the agreement travel on duplicates
            of it, so that nothing can be taken for the user's own messages on it.
    """

    def __init__(self, mpi_comm: Any) -> None:
        super().__init__()
        self._mpi_comm = mpi_comm
        self._rank = mpi_comm.rank
        self._size = mpi_comm.size
        thread_state.know_class(type(self))
        shutdown.cover(mpi_comm)
        lifetime.free_unreferenced(mpi_comm, flight_recorder.world_ranks(mpi_comm))
        headers, self._arrays = lifetime.duplicates(mpi_comm)
        self._agreement = Agreement(headers)
        shutdown.watch(self._agreement)
        # Collectives and messages of one MPI communicator cannot be mistaken for each other.
        self._messages = Messages(self._arrays, headers)
        self._activations = Activations(self._messages)
        if self._agreement.enabled:  # else others may still receive
            self._agreement.at_the_end = _while_alive(self._messages.warn_of_unmatched)
        flight_recorder.number(self.recent_calls())
        self._to_free: list[Callable[[], Any]] = [
            functools.partial(shutdown.forget, self._agreement), self._messages.deadlocks.drain,
            headers.Free, self._arrays.Free]
        lifetime.hold(self._messages, self._agreement.calls.key, self._to_free,
                       self._messages.pending)
        self._mpi_transport = MpiTransport(self._arrays)
        shutdown.covered()
        self._topology = topology.discover(self._arrays)
        with self.config_scope():
            self.batched_copy = False
            self.timeout = None
        if recorder.is_on():
            traced.begin(self)
        unusable.know(self)

    # --- who and where -----------------------------------------------------------------------

    @property
    def mpi_comm(self) -> MPI.Intracomm:
        """The mpi4py communicator this one was made from, for the user's own messages."""
        return self._mpi_comm

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

    # --- how long an operation may take ------------------------------------------------------

    def recent_calls(self) -> tuple[Calls, ...]:
        """Where the calls of this communicator are kept, for reports."""
        return self._agreement.calls, self._messages.calls

    @property
    def timeout(self) -> float | None:
        return self._agreement.calls.limit

    @timeout.setter
    def timeout(self, value: float | None) -> None:
        for calls in self.recent_calls():
            calls.limit = value

    def set_config(self, name: str, value: Any = True, **kwargs: Any) -> None:
        if name != 'timeout' or kwargs:
            super().set_config(name, value, **kwargs)
            return
        limit = None if value is None else watchdog.limit_of(value)
        watchdog.get().allow(limit)
        with self.config_scope():
            self.timeout = limit

    def span(self, name: str) -> AbstractContextManager[Any]:
        return recorder.span(name)

    # --- groups ------------------------------------------------------------------------------

    @collective
    def split(self, color: int, key: int) -> Any:
        try:
            color, key = operator.index(color), operator.index(key)
            if not (0 <= color <= _INT_MAX and -_INT_MAX <= key <= _INT_MAX):
                raise ValueError(f'color has to be from 0 to {_INT_MAX} and key of that size, not '
                                 f'{color} and {key}')
        except Exception as error:
            self.refuse('split', error)
        self._agreement.same(pack('split'))
        with lifetime.explained(self._arrays):
            mpi_comm = self._arrays.Split(color, key)
        return self._like_this(mpi_comm)

    @collective
    def new_group(self, ranks: Sequence[int]) -> Any:
        try:
            if isinstance(ranks, (bool, int, str)) or any(isinstance(r, bool) for r in ranks):
                raise TypeError(f'the ranks of a group have to be a list of integers, not '
                                f'{ranks!r}')
            members = [operator.index(rank) for rank in ranks]
            if not members or sorted(set(members)) != sorted(members):
                raise ValueError(f'a group takes each of its ranks once, and at least one, but got '
                                 f'{members}')
            if not (min(members) >= 0 and max(members) < self._size):
                raise ValueError(f'the ranks of a group have to be from 0 to {self._size - 1}, not '
                                 f'{members}')
        except Exception as error:
            self.refuse('new_group', error)
        self._agreement.same(pack('new_group', number=_signature.digest(members)),
                             {'ranks': str(members)})
        is_member = self._rank in members
        with lifetime.explained(self._arrays):
            mpi_comm = self._arrays.Split(0 if is_member else MPI.UNDEFINED,
                                          members.index(self._rank) if is_member else 0)
        return self._like_this(mpi_comm) if is_member else None

    def _like_this(self, mpi_comm: Any) -> Any:
        """A communicator of the same class and configuration, of some of the ranks."""
        part = type(self)(mpi_comm)
        part._to_free.append(mpi_comm.Free)
        with part.config_scope():
            for name, value in self._configs.items():
                setattr(part, name, value)
        return part

    @collective
    def barrier(self) -> None:
        self._agreement.same(pack('barrier'))
        self._arrays.Barrier()

    @collective
    def serve(self, answer: Callable[[int, Any], Sequence[Any]]) -> Service:
        try:
            check_service(answer)
        except Exception as error:
            self.refuse('serve', error)
        self._agreement.same(pack('serve'))
        return Service(self._arrays.Dup(), answer)

    @collective
    def agree_to_join(self, number: int) -> tuple[int, ...]:
        headers = self._agreement.exchange(pack('join', number=number))
        return tuple(header.number for header in headers)

    def said_in_join(self, error: BaseException) -> tuple[int | None, ...] | None:
        headers = self._agreement.headers_of(error)
        if headers is None:
            return None
        if any(header.refused or header.verb == _signature.END for header in headers):
            return ()
        return tuple(header.number if header.verb == 'join' else None for header in headers)

    @collective
    def finalize(self) -> None:
        if isinstance(self._arrays, Unusable):
            return
        if pending := self._messages.receiving():
            self.refuse('finalize', RuntimeError(
                f'{len(pending)} requests are not complete, such as {pending[0]}; wait() for '
                'them first'))
        self._agreement.same(pack('finalize'))
        self._agreement.at_the_end()
        if self._mean_queue is not None:
            self._mean_queue.free()
            self._twin.finalize()
            self._mean_queue = self._twin = None
        lifetime.release(self._agreement.calls.key)
        while self._to_free:
            self._to_free.pop(0)()
        unusable.forget(self)
        self.give_up(Unusable('this communicator was finalized; make a new one with '
                              'chainermn.create_communicator'))

    def give_up(self, unusable: Unusable) -> None:
        """Makes every operation from now on raise."""
        for name in ('_agreement', '_arrays', '_messages', '_activations', '_mpi_transport'):
            setattr(self, name, unusable)


def _while_alive(method: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that calls a method, but does not keep its object."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := reference()) is not None:
            alive()

    return call
