"""Only one thread at a time may be in collectives of a communicator; a second one gets an error.

The second thread raises at once, since the first one may be in the middle of an exchange.  If the
program catches the error, other ranks may wait for the call of the second thread.  So this rank
then raises the error on all ranks, in its next collective.
"""
from __future__ import annotations

import threading

from chainermn._diagnostics import call_site, thread_state
from chainermn._diagnostics.flight_recorder import FlightRecord
from chainermn._operations import call as calls_of_threads
from chainermn._operations.call import Call


def check(call: Call, record: FlightRecord) -> bool:
    """Raise if another thread is in a collective, or if one was during an earlier call.

    Args:
        call: A collective that this thread begins.
        record: The flight record of its communicator.

    Returns:
        Whether this thread is in a collective already.

    Raises:
        RuntimeError: On this rank only, while another thread is in a collective; on all ranks in
            the next collective.
    """
    inside = record.inside
    thread = None if inside is None else calls_of_threads.thread_of(inside)
    if thread not in (None, threading.get_ident()):
        error = _error(call.operation, thread)
        record.conflict = record.conflict or (call.operation, error)
        raise error
    if record.conflict is not None:
        conflict, record.conflict = record.conflict, None
        call.owner.refuse(*conflict)
    return thread is not None


def _error(operation: str, first: int) -> RuntimeError:
    state = thread_state.snapshots().get(first)
    is_main = threading.current_thread() is threading.main_thread()
    own = '' if is_main else f' in thread {threading.current_thread().name}'
    return RuntimeError('\n'.join([
        'two threads of this rank call collectives of one communicator at the same time',
        f'  first: {"another collective" if state is None else state.state.wait_text}',
        f'  second: in {operation} ({call_site.locate()}{own})',
        'Create a communicator for each thread before the threads start, with comm.split(0, '
        'comm.rank) on all ranks. Or let the threads take turns, in the same order on all ranks.']))
