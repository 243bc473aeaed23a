"""Shutdown: the ranks check that all of them have reached the end of the script.

A rank that exits while others are in a collective would leave them waiting, and it would itself
wait for them in MPI_Finalize. So each finished rank takes part in one more check of each
communicator, with a special operation; a rank in any other operation raises an error.
"""
from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from chainermn import global_except_hook
from chainermn._diagnostics import (
    dump_request,
    node_monitor,
    run_link,
    unusable,
    watchdog,
)
from chainermn._diagnostics.deadlocks import rank_state
from chainermn._diagnostics.flight_recorder import FlightRecord, world_ranks
from chainermn._diagnostics.node_monitor import Registration
from chainermn._operations import call_signature
from chainermn._operations.call import entered
from chainermn._operations.table import END
from chainermn._process import clean_end, runtime
from chainermn._process.mpi import MPI


class Check(Protocol):
    """The consistency check of a communicator."""

    record: FlightRecord
    is_active: bool  # whether there are other ranks
    has_finished_ranks: bool  # whether the last mismatch showed finished ranks
    on_shutdown: Callable[[], None]

    def same(self, signature: bytes) -> bool:
        """Return if all ranks call it with the same signature; otherwise raise on all of them."""


class _Lifecycle(runtime.ProcessState):
    """The shutdown state of this process. A forked child has none, because it is not a rank."""

    def __init__(self) -> None:
        #: The checks in order of creation, which is the same on all ranks of a communicator.
        self.checks: list[Check] = []
        self.callbacks: list[Callable[[], None]] = []
        self.has_started = False
        self.has_ended = False
        self.has_left_creation = False


def _state() -> _Lifecycle:
    return runtime.get(_Lifecycle)


def prepare(mpi_comm: MPI.Intracomm) -> Registration | None:
    """Start the watchdog for the ranks of a communicator, and register the shutdown.

    Collective: every rank of the communicator calls it.

    Returns:
        The information that the ranks exchange for :func:`start`; ``None`` if they do not have to
        call ``start``.
    """
    state = _state()
    if not state.has_started:
        state.has_started = True
        # Registered after mpi4py's function, so called before it: MPI is still initialized.
        atexit.register(_end)
        # If user code calls MPI.Finalize(), MPI calls this first.
        key = MPI.Comm.Create_keyval(delete_fn=lambda *_: _end(is_finalized=True))
        MPI.COMM_SELF.Set_attr(key, True)
        dump_request.listen()
    return node_monitor.prepare() if watchdog.get().add_group(mpi_comm) else None


def start(mpi_comm: MPI.Intracomm, hosts: Sequence[str], registrations: Sequence[Registration]
          ) -> None:
    """Start the node monitor and connect the hosts. Collective: every rank calls it.

    Args:
        mpi_comm: The communicator.
        hosts: The host name of each rank.
        registrations: The result of :func:`prepare` on each rank.
    """
    node_monitor.register(mpi_comm.rank, world_ranks(mpi_comm), registrations)
    watchdog.get().connect_hosts(mpi_comm, hosts)
    run_link.connect(mpi_comm, hosts)


@contextlib.contextmanager
def creation() -> Iterator[None]:
    """Record whether SystemExit or KeyboardInterrupt interrupts the creation of a communicator.

    The other ranks still wait in the creation, so the job is aborted if this rank then finishes.
    """
    state = _state()
    state.has_left_creation = True
    try:
        yield
    except Exception:
        state.has_left_creation = False
        raise
    state.has_left_creation = False


def wait_until_ready() -> None:
    """Wait for the node monitor that :func:`start` has started.

    Must be called before a collective of all ranks.
    """
    node_monitor.wait_until_ready()


def add_check(check: Check) -> None:
    """Add a check that takes part in the shutdown."""
    _state().checks.append(check)


def remove_check(check: Check) -> None:
    """Undo :func:`add_check`. All ranks call it at the same point of the script."""
    if check in _state().checks:
        _state().checks.remove(check)


def add_callback(callback: Callable[[], None]) -> None:
    """Add a function to call during shutdown, unless this rank fails.

    The function may wait until it has been called on every rank.
    """
    _state().callbacks.append(callback)


def remove_callback(callback: Callable[[], None]) -> None:
    """Undo :func:`add_callback`."""
    if callback in _state().callbacks:
        _state().callbacks.remove(callback)


# The shutdown is recorded like an operation, for the watchdog: a rank in the shutdown waits until
# the others finish, and a rank that waits for it in any other operation waits forever.
@entered(END)
def _end(*, is_finalized: bool = False) -> None:
    """Take part in the shutdown.

    Args:
        is_finalized: Whether user code called MPI.Finalize().
    """
    state = _state()
    if state.has_ended or not state.has_started or MPI.Is_finalized():
        return
    state.has_ended = True
    try:
        if not global_except_hook.is_failing():
            if left := _incomplete_operation():
                global_except_hook.abort_job(
                    f'{left} was interrupted on this rank, which then reached the end of the '
                    'script',
                    'An exception such as KeyboardInterrupt or SystemExit interrupted the '
                    'operation, for example from a signal handler, and the other ranks may still '
                    'wait for this rank. Handle signals between operations, and do not catch these '
                    'exceptions.\n')
            if _all_have_finished():
                clean_end.run()
            rank_state.shutdown().may_exit = True
            for callback in list(state.callbacks):
                callback()
            watchdog.get().wait_for_shutdown()
            node_monitor.deregister()
            global_except_hook.mark_finished()
    finally:
        unusable.shut_down(is_finalized)


def _incomplete_operation() -> str:
    """Return the operation in which other ranks wait for this one; '' if there is none."""
    if _state().has_left_creation:
        return 'create_communicator'
    for check in _state().checks:
        record = check.record
        if 0 < record.left_at == record.count and record.newest:  # no operation since
            return record.newest.text
    return ''


def _all_have_finished() -> bool:
    """Return whether all ranks have reached the end of the script."""
    if any(check.has_finished_ranks for check in _state().checks):
        return False  # another rank has finished and waits for this one in MPI_Finalize
    for check in _state().checks:
        if not check.is_active:
            continue
        rank_state.shutdown().ending = check.record
        try:
            check.same(call_signature.pack(END))
            check.on_shutdown()
        except Exception:
            # Catch any type, because the error may be about an invalid argument of another rank. It
            # is also raised on the other ranks, which have not finished and report it.
            return False
        finally:
            rank_state.shutdown().ending = None
    return True
