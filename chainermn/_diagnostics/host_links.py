"""Host links: TCP connections between the hosts of a job, which detect lost hosts.

The lowest rank of each host connects to the lowest rank of the next host, in a ring. The only data
sent is one byte at the end. The kernel probes the connection (TCP keepalive), so a host responds
even if its ranks are stopped or hold the GIL. A link ends in one of the following ways:

- The byte ``FINISHED`` arrives: the ranks of the host have finished.
- The host stops responding: if its ranks do not respond over MPI either, the host is unreachable,
  and the watchdog raises an alarm.
- The other host closes the link: all processes of the job on that host have exited. The node
  monitor keeps the link open, so this does not happen when a single rank fails. After the last rank
  has exited, the monitor sends the byte ``FAILED``, because it has reported the cause. If the byte
  is missing, the monitor was killed as well.

Hosts that cannot connect, for example because of a firewall, are not monitored.
"""
from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from chainermn import global_except_hook
from chainermn._diagnostics import node_monitor, thread_state
from chainermn._diagnostics.flight_recorder import world_ranks
from chainermn._operations.ranks import ranks_text
from chainermn._process import environment, host_connection, streams
from chainermn._process.host_connection import Offer
from chainermn._process.mpi import MPI

_OpenLink: TypeAlias = 'Callable[[], socket.socket | None]'

FINISHED, FAILED = b'g', node_monitor.FAILED

# Seconds.
_ANSWER_TIMEOUT = 4.  # for the ranks of a host to respond over MPI; they poll once per second
_LONG_ANSWER_TIMEOUT = 60.  # if the connection failed for a reason other than silence
_GRACE = 3.  # for mpiexec to stop the job after a reported failure


class Host:
    """A host at the other end of a link."""

    def __init__(self, name: str, ranks: Sequence[int], world: Sequence[int], is_next: bool
                 ) -> None:
        self.name = name
        # Whether it is next in the ring. Only the rank that precedes it warns of a lost link.
        self.is_next = is_next
        self.ranks = ranks  # in the communicator
        self.text = f'host {name} ({ranks_text(world)})'
        self.error: int | None = None  # why the link was lost
        self.asked_at: float | None = None  # when its ranks were asked to respond over MPI
        self.has_answered = False


class HostLinks:
    """The links of this rank to the previous and the next host. Most ranks have no links.

    Collective if there are several hosts: every rank creates it.

    Args:
        mpi_comm: The MPI communicator.
        hosts: The host name of each rank.
        can_ask: Whether the ranks can respond over MPI while they are in an operation.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, hosts: Sequence[str], can_ask: bool) -> None:
        self._hosts: list[Host] = []
        self._links: list[socket.socket] = []
        self._is_closed = False
        names = list(dict.fromkeys(hosts))
        if len(names) == 1:
            return
        place = names.index(hosts[mpi_comm.rank])
        is_leader = hosts.index(names[place]) == mpi_comm.rank and can_ask and _is_enabled()
        previous, following = names[place - 1], names[(place + 1) % len(names)]
        # Two hosts share a single link.
        accepts, connects = (len(names) > 2 or place == 1), (len(names) > 2 or place == 0)
        listener, secret, offer = None, host_connection.new_secret(), None
        if is_leader and accepts:
            with contextlib.suppress(OSError):
                listener = host_connection.listen()
                offer = Offer(host_connection.addresses(), listener.getsockname()[1], secret)
        offers: list[Offer | None] = mpi_comm.allgather(offer)
        if not is_leader:
            return
        world = world_ranks(mpi_comm)

        def start(name: str, is_next: bool, open_link: _OpenLink) -> None:
            ranks = [rank for rank, there in enumerate(hosts) if there == name]
            host = Host(name, ranks, [world[rank] for rank in ranks], is_next)
            self._hosts.append(host)
            # If a host has two neighbors, both see that its processes have exited. One of them
            # reports this at once, the other one only if the job continues after a grace period.
            threading.Thread(target=self._run, args=(host, open_link, is_next or len(names) == 2),
                             name=f'{thread_state.HOST_LINK} to {name}', daemon=True).start()

        if listener is not None:
            server = listener
            start(previous, False, lambda: host_connection.accept(server, secret))
        theirs = offers[hosts.index(following)]
        if connects and theirs is not None:
            start(following, True, lambda: host_connection.connect(theirs))

    def failure(self, ask: Callable[[Sequence[int]], None], now: float) -> str:
        """Return why a host is unreachable; '' if none is.

        Args:
            ask: Function that asks ranks over MPI to respond; see :meth:`answered`.
            now: The current time.
        """
        for host in list(self._hosts):
            if host.error is None:
                continue
            if host.asked_at is None:
                host.asked_at = now
                ask(host.ranks)
            elif host.has_answered:
                self._hosts.remove(host)
                if host.is_next:
                    streams.write(
                        f'chainermn: the network connection to {host.text} was lost '
                        f'({os.strerror(host.error)}), but MPI still reaches the host. '
                        'The job continues; a later failure of this host may not be detected.\n')
                continue
            is_silent = host.error in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
            if host.asked_at is not None and now > host.asked_at + (
                    _ANSWER_TIMEOUT if is_silent else _LONG_ANSWER_TIMEOUT):
                why = (f'no response for {host_connection.SILENCE} s' if is_silent
                       else os.strerror(host.error))
                return f'{host.text} is unreachable: {why}'
        return ''

    def answered(self, rank: int) -> None:
        """Record that a rank of the communicator has responded over MPI."""
        for host in self._hosts:
            if rank in host.ranks and host.asked_at is not None:
                host.has_answered = True

    def close(self) -> None:
        """Announce that all ranks have reached the end of the script."""
        self._is_closed = True
        for link in self._links:
            with contextlib.suppress(OSError):
                link.send(FINISHED)
                link.shutdown(socket.SHUT_RDWR)

    def _run(self, host: Host, open_link: _OpenLink, reports_at_once: bool) -> None:
        link = open_link()
        if link is None:
            if environment.flag(environment.DEBUG):
                streams.write(f'chainermn: no network connection to {host.text}; if this host '
                              'becomes unreachable, only the timeout will detect it\n')
            return
        with link:
            self._links.append(link)
            node_monitor.keep_open(link.fileno())
            if self._is_closed:
                self.close()
            try:
                received = link.recv(1)  # blocks in the kernel
            except OSError as e:
                if not self._is_closed:
                    host.error = e.errno or errno.EIO  # the watchdog polls it
                return
        if received == FINISHED:
            return
        if received == FAILED or not reports_at_once:
            time.sleep(_GRACE)
        if not self._is_closed:
            global_except_hook.abort_job(f'all processes of {host.text} have exited', '')


def _is_enabled() -> bool:
    return sys.platform == 'linux' and global_except_hook.aborts_job() and (
        environment.flag(environment.HOST_LINKS, default=True))
