"""At the end of the program the ranks agree that it is the end.

A rank that runs off its script while others are inside a collective would leave them waiting, and
wait for them itself in MPI_Finalize.  So each rank that ends takes part in one more agreement of
each communicator, under the name of an operation; whoever is inside another one learns of it there.
"""
from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from chainermn import _signature, global_except_hook
from chainermn._diagnostics import node_monitor, progress, thread_state, unusable, watchdog

# In the order in which they were made, which is the same on all their ranks.
_agreements: list[Any] = []
# What each rank does once it has agreed, or cannot: it may wait until every rank does it.
_last: list[Callable[[], None]] = []
_process = 0
_is_over = False


def cover(mpi_comm: Any) -> None:
    """Lets the ranks of a communicator watch over one another until they end.

    Collective: every rank of it calls it.
    """
    global _process, _is_over
    if _process != os.getpid():
        _process, _is_over = os.getpid(), False
        # After that of mpi4py, so before it: MPI is still there.
        atexit.register(_end)
        # Who calls MPI.Finalize() ends there: MPI calls this before it is gone.
        key = MPI.Comm.Create_keyval(delete_fn=lambda *_: _end())
        MPI.COMM_SELF.Set_attr(key, True)
    if mpi_comm.size > 1 and watchdog.get().cover(mpi_comm):
        node_monitor.attend(mpi_comm)


def covered() -> None:
    """Waits for what :func:`cover` has begun, ahead of a collective of all ranks."""
    node_monitor.wait_until_ready()


def watch(agreement: Any) -> None:
    """Lets an agreement take part when the program ends."""
    _agreements.append(agreement)


def forget(agreement: Any) -> None:
    """Undoes :func:`watch`, on all ranks at once."""
    if agreement in _agreements:
        _agreements.remove(agreement)


def before_the_end(finish: Callable[[], None]) -> None:
    """Lets a function be called when the program ends, unless this rank fails."""
    _last.append(finish)


def not_before_the_end(finish: Callable[[], None]) -> None:
    """Undoes :func:`before_the_end`."""
    if finish in _last:
        _last.remove(finish)


def _end() -> None:
    global _is_over
    if _is_over or os.getpid() != _process or MPI.Is_finalized():
        return
    _is_over = True
    try:
        if not global_except_hook.is_failing():
            for agreement in _agreements:
                calls = agreement.calls
                if 0 < calls.left == calls.count:  # it has entered no other one since
                    global_except_hook.end_the_job(
                        'it left an operation before that was complete, and has come to the end '
                        'of the program', f'The operation was {calls.newest.text}.\n')
            _agree_on_the_end()
            progress.has_agreed = True
            for finish in list(_last):
                finish()
            watchdog.get().wait_for_the_end()
            node_monitor.say_goodbye()
            global_except_hook.is_over = True
    finally:
        unusable.shut_down()


def _agree_on_the_end() -> None:
    if any(agreement.is_over for agreement in _agreements):
        return  # another rank has ended, and waits for this one in MPI_Finalize
    for agreement in _agreements:
        if not agreement.is_active:
            continue
        progress.ending = agreement.calls
        try:
            agreement.same(_signature.pack(_signature.END))
            agreement.at_the_end()
        except Exception:
            # Of any type: another rank may have been refused.  It is raised on the others as well,
            # which have not ended and say so.
            return
        finally:
            progress.ending = None


# Who waits there waits for others to end, too; who waits elsewhere for a rank that is there waits
# forever.
thread_state.know([_end], _signature.END)
