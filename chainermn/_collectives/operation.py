"""The wrapper of each operation, and the base class of all families of operations."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeVar, cast, overload

from chainermn._collectives import one_thread
from chainermn._collectives.foreign_arguments import explained
from chainermn._collectives.tracer import Tracer
from chainermn._consistency.consistency_check import CalledBy, ConsistencyCheck
from chainermn._diagnostics import current_operations
from chainermn._diagnostics.current_operations import local
from chainermn._diagnostics.flight_recorder import FlightRecord
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

    - The watchdog sees which operation the thread is in.
    - The operation is recorded on the timeline, if there is one.

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
    return functools.partial(
        _collective if BY_NAME[what].waits_for is Waits.RANKS else _other, what)


def _collective(name: str, method: _Method) -> _Method:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        self: Operations = args[0]  # passing on `args` as it is is faster
        thread = local.thread
        outer = thread.innermost
        try:
            thread.innermost = name, self, outer
            calls = self._consistency.calls
            inside = calls.inside
            if inside is not None and inside is not thread:
                one_thread.check(self, name, calls, thread)
                inside = None
            tracer = self._tracer
            count = calls.count
            calls.inside = thread
            try:
                if tracer is None or tracer.is_inside:
                    return method(*args, **kwargs) if kwargs else method(*args)
                return tracer.time(name, calls, method, args, kwargs)
            except Exception as error:
                if calls.count == count:
                    self.refuse(name, explained(error, name, method, args, kwargs))
                raise
            except BaseException:
                calls.left_at = calls.count
                raise
            finally:
                if calls.inside is thread:
                    calls.inside = inside
        finally:
            thread.innermost = outer

    return cast(_Method, run)


class Traced(Protocol):
    """A class with operations that wait for less than all ranks."""

    _tracer: Tracer | None

    def _traced_calls(self) -> FlightRecord:
        """Return the flight record of these operations."""


def _other(name: str, method: _Method) -> _Method:
    """Make a method an operation that waits for less than all ranks, such as a message."""
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        self: Traced = args[0]
        thread = local.thread
        outer = thread.innermost
        try:
            thread.innermost = name, self, outer
            tracer = self._tracer
            if tracer is None or tracer.is_inside:
                return method(*args, **kwargs) if kwargs else method(*args)
            return tracer.time(name, self._traced_calls(), method, args, kwargs)
        except TypeError as error:
            better = explained(error, name, method, args, kwargs)
            if better is error:
                raise
            raise better from None
        finally:
            thread.innermost = outer

    return cast(_Method, run)


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

    @current_operations.recorded('refuse')
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

