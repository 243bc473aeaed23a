"""What makes a function over a communicator an operation."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from chainermn._collectives import one_thread
from chainermn._collectives.foreign_arguments import explained
from chainermn._diagnostics.flight_recorder import FlightRecord
from chainermn._operations.call import Call, entered
from chainermn._operations.table import BY_NAME, Waits

_Method = TypeVar('_Method', bound=Callable[..., Any])


@overload
def operation(method: _Method, /) -> _Method: ...
@overload
def operation(name: str, /) -> Callable[[_Method], _Method]: ...
def operation(what: Any, /) -> Any:
    """Make a function the operation of its name, or of the given name, in ``_operations/table.py``.

    Its first argument is the communicator.

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
    calls: FlightRecord = call.owner._context.check.calls
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
