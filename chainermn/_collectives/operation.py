"""The decorator that turns a function over a communicator into an operation."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from chainermn._collectives import one_thread
from chainermn._collectives.foreign_arguments import better_error
from chainermn._consistency.consistency_check import ConsistencyCheck
from chainermn._diagnostics.flight_recorder import FlightRecord
from chainermn._operations.call import Call, entered
from chainermn._operations.table import BY_NAME, Waits

#: All ranks raise the errors of these, as far as they can.
_LIBRARIES = frozenset({
    'builtins', 'chainer', 'chainermn', 'cupy', 'cupy_backends', 'mpi4py', 'numpy', '_pickle'})

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
    - A signal handler may raise an exception anywhere.  If no other rank knows of the call, it is
      an error on all ranks; otherwise, this rank completes what the others wait for, if possible.
      The flight recorder notes an incomplete operation.
    """
    if not isinstance(what, str):
        return operation(what.__name__)(what)
    assert what in BY_NAME, f'{what} is not declared in _operations/table.py'
    if BY_NAME[what].waits_for is Waits.RANKS:
        return entered(what, _begin, _fail)
    return entered(what, None, _raise_better)


def _begin(call: Call) -> FlightRecord | None:
    """Begin a collective, unless it is a part of another one of its communicator."""
    check: ConsistencyCheck = call.owner._context.check
    record = check.record
    is_busy = record.inside is not None or record.conflict is not None
    if is_busy and one_thread.check(call, record):
        return None
    exchange = check.exchange
    exchange.before = exchange.published[0]
    record.before = record.count
    record.inside = call
    return record


def _fail(call: Call, record: FlightRecord | None, error: BaseException,
          method: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
          ) -> None:
    """Raise an error of a collective on all ranks, unless the ranks have compared their calls."""
    if record is None:
        return  # it has not begun, or the collective around it does this
    if not isinstance(error, Exception):
        record.left_at = record.count
    if not call.owner._context.check.is_untold(error):
        return
    library, _, _ = type(error).__module__.partition('.')
    if isinstance(error, Exception) and library in _LIBRARIES:
        call.owner.refuse(call.operation, better_error(error, call.operation, method, args, kwargs))
    # The program expects its own exception, which others cannot raise, perhaps of a signal handler.
    with contextlib.suppress(Exception):
        call.owner.refuse(call.operation, error if isinstance(error, Exception) else RuntimeError(
            f'interrupted by {type(error).__name__}'))
    record.left_at = 0


def _raise_better(call: Call, begun: None, error: BaseException, method: Callable[..., object],
                  args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raise a better error if the arguments of an operation do not fit."""
    if isinstance(error, TypeError):
        better = better_error(error, call.operation, method, args, kwargs)
        if better is not error:
            raise better from None
