"""The decorator that turns a function into an operation of a communicator."""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from chainermn._collectives.foreign_arguments import better_error
from chainermn._consistency.consistency_check import ConsistencyCheck
from chainermn._diagnostics import call_site, thread_state
from chainermn._diagnostics.flight_recorder import FlightRecord
from chainermn._operations.call import Call, entered, thread_of
from chainermn._operations.table import BY_NAME, Waits

#: Libraries whose errors are raised on all ranks. User code may define other exceptions, which the
#: other ranks might not be able to raise.
_LIBRARIES = frozenset({
    'builtins', 'chainer', 'chainermn', 'cupy', 'cupy_backends', 'mpi4py', 'numpy', '_pickle'})

_Method = TypeVar('_Method', bound=Callable[..., Any])


@overload
def operation(method: _Method, /) -> _Method: ...
@overload
def operation(name: str, /) -> Callable[[_Method], _Method]: ...
def operation(what: Any, /) -> Any:
    """Turn a function into an operation with the same name, or with the given name.

    The operation must be declared in ``_operations/table.py``. The first argument of the function
    is the communicator.

    - Each call is recorded as a :class:`Call`, for the watchdog and the timeline.

    If the operation waits for all ranks:

    - A second thread that calls such an operation at the same time gets an error.
    - An error before the ranks have compared their calls, such as an invalid argument, is raised on
      all ranks.
    - A signal handler may raise an exception at any point. If no other rank knows of the call yet,
      all ranks raise an error. Otherwise, this rank completes the steps that the others wait for,
      if possible. The flight recorder notes an incomplete operation.
    """
    if not isinstance(what, str):
        return operation(what.__name__)(what)
    assert what in BY_NAME, f'{what} is not declared in _operations/table.py'
    if BY_NAME[what].waits_for is Waits.RANKS:
        return entered(what, _begin, _fail)
    return entered(what, None, _raise_better)


def _begin(call: Call) -> FlightRecord | None:
    """Begin a collective, unless it is part of another collective of the same communicator."""
    check: ConsistencyCheck = call.owner._context.check
    record = check.record
    is_busy = record.inside is not None or record.conflict is not None
    if is_busy and _is_within_another(call, record):
        return None
    exchange = check.exchange
    exchange.before = exchange.published[0]
    record.before = record.count
    record.inside = call
    return record


def _is_within_another(call: Call, record: FlightRecord) -> bool:
    """Return whether this thread is already in a collective.

    Only one thread at a time may be in a collective of a communicator. A second thread raises an
    error immediately, because the first one may be in the middle of communication. If user code
    catches the error, other ranks may be waiting for the call of the second thread. So this rank
    raises the error on all ranks in its next collective.

    Args:
        call: The collective that this thread begins.
        record: The flight record of the communicator.

    Raises:
        RuntimeError: On this rank only, while another thread is in a collective; on all ranks in
            the next collective.
    """
    inside = record.inside
    thread = None if inside is None else thread_of(inside)
    if thread not in (None, threading.get_ident()):
        error = _two_threads_error(call.operation, thread)
        record.conflict = record.conflict or (call.operation, error)
        raise error
    if record.conflict is not None:
        conflict, record.conflict = record.conflict, None
        call.owner.refuse(*conflict)
    return thread is not None


def _two_threads_error(operation: str, first: int) -> RuntimeError:
    state = thread_state.snapshots().get(first)
    is_main = threading.current_thread() is threading.main_thread()
    own = '' if is_main else f' in thread {threading.current_thread().name}'
    return RuntimeError('\n'.join([
        'two threads of this rank called collectives of one communicator at the same time',
        f'  first: {"another collective" if state is None else state.state.wait_text}',
        f'  second: in {operation} ({call_site.locate()}{own})',
        'Create a communicator for each thread before the threads start, with comm.split(0, '
        'comm.rank) on all ranks. Or make the threads take turns, in the same order on all '
        'ranks.']))


def _fail(call: Call, record: FlightRecord | None, error: BaseException,
          method: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
          ) -> None:
    """Raise an error of a collective on all ranks unless they have already compared their calls."""
    if record is None:
        return  # the call has not begun, or the enclosing collective raises the error
    if not isinstance(error, Exception):
        record.left_at = record.count
    if not call.owner._context.check.is_unknown_to_others(error):
        return
    library, _, _ = type(error).__module__.partition('.')
    if isinstance(error, Exception) and library in _LIBRARIES:
        call.owner.refuse(call.operation, better_error(error, call.operation, method, args, kwargs))
    # User code expects its own exception on this rank, perhaps one from a signal handler. Other
    # ranks may not be able to raise it, so they get a different one.
    with contextlib.suppress(Exception):
        call.owner.refuse(call.operation, error if isinstance(error, Exception) else RuntimeError(
            f'interrupted by {type(error).__name__}'))
    record.left_at = 0


def _raise_better(call: Call, begun: None, error: BaseException, method: Callable[..., object],
                  args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raise a better error if the arguments of an operation do not match its signature."""
    if isinstance(error, TypeError):
        better = better_error(error, call.operation, method, args, kwargs)
        if better is not error:
            raise better from None
