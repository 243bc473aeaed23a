"""Deadlocks in chainermn.functions: two ranks that wait for each other raise the same error.

A rank that has waited for another one longer than a grace period sends it a notice: its own wait,
and the numbers of messages that it has sent to that rank and received from it.  If the other rank
waits for this one as well, and no message is in flight that could end either wait, both wait
forever.  The counts are valid whenever the notice arrives, so a slow rank is never reported as a
deadlock.  A rank takes no part in this while another thread of its program runs, which may end the
wait of the other rank.
"""
from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from chainermn._diagnostics import program_threads
from chainermn._diagnostics.drain import drain
from chainermn._diagnostics.flight_recorder import MessageRecord
from chainermn._process.mpi import MPI

# Seconds.
_GRACE = 1.  # before a rank sends a notice, and between two looks at its other threads
_POLL_INTERVAL = 1e-4  # between two polls after that


class PeerWait(NamedTuple):
    """The wait of a rank for another one, which has to receive or send a message."""

    is_send: bool
    tag: int
    text: str  # for the error


class _Notice(NamedTuple):
    wait: PeerWait
    n_sent: int  # messages to the rank that gets the notice
    n_marked: int  # messages of chainermn.functions among them, sent one after the other
    n_received: int  # from that rank


class Deadlocks:
    """Waits for messages of chainermn.functions, and detects deadlocks.

    Args:
        mpi_comm: Communicator.
        tag: The tag of notices; no other message on the communicator has it.
        calls: The flight record of this rank's messages.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, tag: int, calls: MessageRecord) -> None:
        self._mpi_comm = mpi_comm
        self._tag = tag
        self._rank = mpi_comm.rank
        size = mpi_comm.size
        self._calls = calls
        #: Messages of chainermn.functions, by rank.
        self.n_marked_sent, self.n_marked_received = [0] * size, [0] * size
        self._notices: dict[int, _Notice] = {}  # the newest one, by rank
        self._sends: list[MPI.Request] = []

    def wait(self, request: MPI.Request, peer: int, wait: PeerWait,
             is_receiving: Callable[[], object], status: MPI.Status | None = None) -> None:
        """Return once a request is complete.

        Args:
            request: The request.
            peer: The rank that this rank waits for.
            wait: The wait, for the notice.
            is_receiving: Lets requests of ``irecv`` make progress; returns whether one is pending.
            status: Filled when the request is complete.

        Raises:
            ValueError: If this rank and ``peer`` wait for each other.
        """
        while self._next_notice(peer):
            pass
        has_notified, own_thread = False, {threading.get_ident()}
        start = look_at = time.monotonic() + _GRACE
        while not request.Test(status):
            now = time.monotonic()
            if is_receiving() or now < start:
                os.sched_yield()
                continue
            if not has_notified and now >= look_at:
                look_at = now + _GRACE
                if not program_threads.are_running(own_thread):
                    has_notified = True
                    self._notify(peer, wait)
                    self._check(peer, wait)
            while has_notified and self._next_notice(peer):
                self._check(peer, wait)
            time.sleep(_POLL_INTERVAL)

    def _notify(self, peer: int, wait: PeerWait) -> None:
        self._sends = [send for send in self._sends if not send.Test()]
        notice = _Notice(wait, _total(self._calls.sent, peer), self.n_marked_sent[peer],
                         _total(self._calls.received, peer))
        # Synchronous, so that drain() can tell when it was received.
        self._sends.append(self._mpi_comm.Issend(pickle.dumps(notice), peer, self._tag))

    def drain(self) -> None:
        """Receive all remaining notices.  Collective: every rank calls it.

        Otherwise MPI would deliver them to a later communicator with the same context ID.
        """
        def receive() -> None:
            while self._next_notice(MPI.ANY_SOURCE):
                pass

        drain(self._mpi_comm, receive, self._sends)
        self._sends = []

    def _next_notice(self, peer: int) -> bool:
        """Receive a notice; return whether there was one."""
        status = MPI.Status()
        message = self._mpi_comm.Improbe(peer, self._tag, status)
        if message is None:
            return False
        buffer = bytearray(status.Get_count())
        message.Recv(buffer)
        self._notices[status.Get_source()] = pickle.loads(buffer)
        return True

    def _check(self, peer: int, mine: PeerWait) -> None:
        """Raise if the newest notice of a rank and the wait of this rank form a deadlock."""
        notice = self._notices.get(peer)
        if notice is None:
            return
        theirs = notice.wait
        if mine.is_send != theirs.is_send and (
                mine.tag == theirs.tag or min(mine.tag, theirs.tag) < 0):  # negative: any tag
            return  # the message that ends both waits is in flight
        if (_total(self._calls.sent, peer) - notice.n_received != mine.is_send
                or notice.n_sent - _total(self._calls.received, peer) != theirs.is_send
                or notice.n_marked - self.n_marked_received[peer] != theirs.is_send):
            return  # an old notice, or other messages are in flight
        del self._notices[peer]
        raise mismatch(
            f'chainermn.functions: ranks {min(self._rank, peer)} and {max(self._rank, peer)} wait '
            'for each other', {self._rank: mine.text, peer: theirs.text})


def _total(counts: Mapping[tuple[int, int], int], peer: int) -> int:
    """Count messages to or from a rank, with any tag."""
    return sum(n for (other, _), n in counts.items() if other == peer)


def mismatch(title: str, calls: dict[int, str]) -> ValueError:
    """Return the error for calls of two ranks that do not match.

    Args:
        title: The first line of the message.
        calls: The call of each of the two ranks.
    """
    return ValueError('\n'.join([
        title, *(f'  rank {rank}: {text}' for rank, text in sorted(calls.items())),
        'Each send needs a recv on the other rank. If a Variable is sent, both ranks have to run '
        'backward through it; send an array (x.array) if no gradient is needed.']))
