"""What makes a method an operation, and the base class of all families of operations."""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, overload

from chainermn._collectives import one_thread
from chainermn._collectives.foreign_arguments import explained
from chainermn._collectives.tracer import Tracer
from chainermn._consistency.consistency_check import CalledBy, ConsistencyCheck
from chainermn._diagnostics.flight_recorder import FlightRecord
from chainermn._operations.call import Call, entered
from chainermn._operations.call_signature import NO_UPDATE, Caller, Update
from chainermn._operations.table import BY_NAME, Waits
from chainermn._process.mpi import MPI
from chainermn._transport.mpi_transport import MpiTransport

_Method = TypeVar('_Method', bound=Callable[..., Any])


@overload
def operation(method: _Method, /) -> _Method: ...
@overload
def operation(name: str, /) -> Callable[[_Method], _Method]: ...
def operation(what: Any, /) -> Any:
    """Make a method the operation of its name, or of the given name, in ``_operations/table.py``.

    - Each call is a :class:`Call`, which the watchdog and the timeline see.

    If it waits for all ranks:

    - A second thread that calls one at the same time gets an error.

    - An error before the ranks have compared their calls, such as an invalid argument, is raised on
      all ranks.
    - If SystemExit or KeyboardInterrupt interrupts an operation, for example in a signal handler,
      the flight recorder notes it: the other ranks are waiting there.
    """
    if not isinstance(what, str):
        return operation(what.__name__)(what)
    assert what in BY_NAME, f'{what} is not declared in _operations/table.py'
    if BY_NAME[what].waits_for is Waits.RANKS:
        return entered(what, _begin, _fail)
    return entered(what, None, _explain)


def _begin(call: Call) -> FlightRecord | None:
    """Begin a collective, unless it is a part of another one of its communicator."""
    calls: FlightRecord = call.owner._consistency.calls
    if (calls.inside is not None or calls.conflict is not None) and one_thread.check(call, calls):
        return None
    calls.before = calls.count
    calls.inside = call
    return calls


def _fail(call: Call, calls: FlightRecord | None, error: BaseException,
          method: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
          ) -> None:
    """Raise an error of a collective on all ranks, unless the ranks have compared their calls."""
    if calls is None:
        return  # it has not begun, or the collective around it does this
    if not isinstance(error, Exception):
        calls.left_at = calls.count
    elif calls.count == calls.before:
        call.owner.refuse(call.operation, explained(error, call.operation, method, args, kwargs))


def _explain(call: Call, begun: None, error: BaseException, method: Callable[..., object],
             args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raise a better error if the arguments of an operation do not fit."""
    if isinstance(error, TypeError):
        better = explained(error, call.operation, method, args, kwargs)
        if better is not error:
            raise better from None


_named = functools.lru_cache(maxsize=None)(Caller)


class Operations:
    """The attributes of the communicator that every family of operations uses."""

    _consistency: ConsistencyCheck
    _arrays: MPI.Intracomm  # for data that no transport carries
    _transport: MpiTransport
    _mpi_transport: MpiTransport
    _tracer: Tracer | None = None
    _rank: int
    _size: int

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @entered('refuse')
    def refuse(self, operation: str, error: Exception) -> NoReturn:
        self._consistency.refuse(operation, error)

    def called_by(self, caller: Caller | str, update: Update = NO_UPDATE) -> CalledBy:
        return CalledBy(
            self._consistency, _named(caller) if isinstance(caller, str) else caller, update)

    def _transport_for(self, on_device: bool, homogeneous: bool = True) -> MpiTransport:
        """Select the transport for arrays.

        Args:
            on_device: Whether the arrays of this rank are on a device.
            homogeneous: Whether ``on_device`` is equal on all ranks.
        """
        if homogeneous and self._transport.carries(on_device):
            return self._transport
        return self._mpi_transport

