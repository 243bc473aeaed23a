"""Two threads in collectives of one communicator: an error instead of mixed messages.

The second thread raises at once, since the first one may be in the middle of an exchange.  If the
program catches the error, other ranks may wait for the call of the second thread.  So this rank
then raises the error on all ranks, in its next collective.
"""
from __future__ import annotations

import threading
from typing import NamedTuple, Protocol

from chainermn._diagnostics import call_site, current_operations, thread_state
from chainermn._diagnostics.current_operations import Thread
from chainermn._diagnostics.flight_recorder import FlightRecord


class _Communicator(Protocol):
    def refuse(self, operation: str, error: Exception) -> object:
        """Raise an error on all ranks."""


class _Conflict(NamedTuple):
    """The error of a second thread, which the other ranks do not know yet."""

    first: Thread
    operation: str
    error: RuntimeError


def check(comm: _Communicator, operation: str, calls: FlightRecord, thread: Thread) -> None:
    """Raise if another thread is in a collective, or if one was during an earlier call.

    Args:
        comm: The communicator.
        operation: The collective that this thread calls.
        calls: The flight record of the collectives.
        thread: This thread.

    Raises:
        RuntimeError: On this rank only, while another thread is in a collective; on all ranks in
            the next collective.
    """
    inside = calls.inside
    if isinstance(inside, _Conflict):
        if inside.first is not thread and current_operations.is_inside(inside.first, comm):
            raise _error(operation, inside.first)
        calls.inside = None
        comm.refuse(inside.operation, inside.error)
    # A signal handler may have ended the other thread's operation in between.
    if isinstance(inside, Thread) and current_operations.is_inside(inside, comm):
        error = _error(operation, inside)
        calls.inside = _Conflict(inside, operation, error)
        raise error


def _error(operation: str, first: Thread) -> RuntimeError:
    ident = current_operations.ident_of(first)
    state = thread_state.snapshots().get(-1 if ident is None else ident)
    is_main = threading.current_thread() is threading.main_thread()
    own = '' if is_main else f' in thread {threading.current_thread().name}'
    return RuntimeError('\n'.join([
        'two threads of this rank call collectives of one communicator at the same time',
        f'  first: {"another collective" if state is None else state.state.wait_text}',
        f'  second: in {operation} ({call_site.locate()}{own})',
        'Create a communicator for each thread before the threads start, with comm.split(0, '
        'comm.rank) on all ranks. Or let the threads take turns, in the same order on all ranks.']))
