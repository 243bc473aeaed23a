"""Host links: TCP connections between the hosts of a job, which show that a host is lost.

The lowest rank of each host connects to that of the next host, in a ring.  Nothing is sent but one
byte at the end.  The kernel probes the connection (TCP keepalive), so a host answers even if its
ranks are stopped, or hold the GIL.  A link ends in one of these ways:

- the byte ``FINISHED``: the ranks of the host have finished;
- no answer: if the ranks of the host do not answer over MPI either, the host is unreachable, and
  the watchdog raises an alarm;
- closed by the other host: all processes of the job on that host have ended.  The node monitor
  keeps the link open, so this does not happen when a rank fails, and after the last rank has exited
  it sends the byte ``FAILED``, as it has reported the cause.  If the byte is missing, the monitor
  was killed as well.

Hosts that cannot connect, for example because of a firewall, are not monitored.
"""
from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from mpi4py import MPI

from chainermn import _environment, _streams, global_except_hook
from chainermn._diagnostics import node_monitor, thread_state
from chainermn._diagnostics.flight_recorder import world_ranks
from chainermn._ranks import ranks_text

_OpenLink: TypeAlias = 'Callable[[], socket.socket | None]'

FINISHED, FAILED = b'g', node_monitor.FAILED

# Seconds.
_PROBE_INTERVAL = 4
_SILENCE = 6 * _PROBE_INTERVAL  # after which the kernel closes a link
_ANSWER_TIMEOUT = 4.  # for the ranks of a host to answer over MPI; they poll once per second
_LONG_ANSWER_TIMEOUT = 60.  # if the connection failed for another reason than silence
_CONNECT_TIMEOUT = 600.  # long, since a rank may hold the GIL after startup
_HANDSHAKE_TIMEOUT = 10.
_GRACE = 3.  # for mpiexec to end the job after a failure that was reported

_MAX_ADDRESSES = 16
_SECRET = 32  # bytes: the first half is sent by the client, the second half by the server
_SIOCGIFADDR = 0x8915


class Offer(NamedTuple):
    """Where a leader accepts a connection."""

    addresses: Sequence[str]
    port: int
    secret: bytes


class Host:
    """A host at the other end of a link."""

    def __init__(self, name: str, ranks: Sequence[int], world: Sequence[int], is_next: bool
                 ) -> None:
        self.name = name
        self.is_next = is_next  # in the ring; of the two ends of a link, this one reports
        self.ranks = ranks  # in the communicator
        self.text = f'host {name} ({ranks_text(world)})'
        self.error: int | None = None  # why the link was lost
        self.asked_at: float | None = None  # over MPI
        self.has_answered = False


class HostLinks:
    """The links of this rank to the previous and the next host; none on most ranks.

    Collective if there are several hosts: every rank creates it.

    Args:
        mpi_comm: The ranks.
        hosts: The name of the host of each of them.
        can_ask: Whether the ranks can answer over MPI while they are in an operation.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, hosts: Sequence[str], can_ask: bool) -> None:
        self._hosts: list[Host] = []
        self._links: list[socket.socket] = []
        self._is_closed = False
        self._process = os.getpid()
        names = list(dict.fromkeys(hosts))
        if len(names) == 1:
            return
        place = names.index(hosts[mpi_comm.rank])
        is_leader = hosts.index(names[place]) == mpi_comm.rank and can_ask and _is_enabled()
        previous, following = names[place - 1], names[(place + 1) % len(names)]
        # Two hosts have one link.
        accepts, connects = (len(names) > 2 or place == 1), (len(names) > 2 or place == 0)
        listener, secret, offer = None, secrets.token_bytes(_SECRET), None
        if is_leader and accepts:
            with contextlib.suppress(OSError):
                listener = listen()
                offer = Offer(addresses(), listener.getsockname()[1], secret)
        offers: list[Offer | None] = mpi_comm.allgather(offer)
        if not is_leader:
            return
        world = world_ranks(mpi_comm)

        def start(name: str, is_next: bool, open_link: _OpenLink) -> None:
            ranks = [rank for rank, there in enumerate(hosts) if there == name]
            host = Host(name, ranks, [world[rank] for rank in ranks], is_next)
            self._hosts.append(host)
            # If a host has two neighbors, one of them reports its end.
            threading.Thread(target=self._run, args=(host, open_link, is_next or len(names) == 2),
                             name=f'{thread_state.HOST_LINK} to {name}', daemon=True).start()

        if listener is not None:
            server = listener
            start(previous, False, lambda: accept(server, secret))
        theirs = offers[hosts.index(following)]
        if connects and theirs is not None:
            start(following, True, lambda: connect(theirs))

    def failure(self, ask: Callable[[Sequence[int]], None]) -> str:
        """Returns why a host is unreachable; '' if none is.

        Args:
            ask: Asks ranks over MPI to answer, for :meth:`answered`.
        """
        now = time.monotonic()
        for host in list(self._hosts):
            if host.error is None:
                continue
            if host.asked_at is None:
                host.asked_at = now
                ask(host.ranks)
            elif host.has_answered:
                self._hosts.remove(host)
                if host.is_next:
                    _streams.write(
                        f'chainermn: the network connection to {host.text} was lost '
                        f'({os.strerror(host.error)}), but MPI still reaches it. The job '
                        'continues; a later failure of this host may not be detected.\n')
                continue
            is_silent = host.error in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
            if host.asked_at is not None and now > host.asked_at + (
                    _ANSWER_TIMEOUT if is_silent else _LONG_ANSWER_TIMEOUT):
                why = f'no answer for {_SILENCE} s' if is_silent else os.strerror(host.error)
                return f'{host.text} is unreachable: {why}'
        return ''

    def answered(self, rank: int) -> None:
        """Notes that a rank of the communicator has answered over MPI."""
        for host in self._hosts:
            if rank in host.ranks and host.asked_at is not None:
                host.has_answered = True

    def close(self) -> None:
        """Announces that all ranks have reached the end of the program."""
        self._is_closed = True
        if self._process != os.getpid():
            return
        for link in self._links:
            with contextlib.suppress(OSError):
                link.send(FINISHED)
                link.shutdown(socket.SHUT_RDWR)

    def _run(self, host: Host, open_link: _OpenLink, is_first: bool) -> None:
        link = open_link()
        if link is None:
            if _environment.flag(_environment.DEBUG):
                _streams.write(f'chainermn: no network connection to {host.text}; if it becomes '
                               'unreachable, only the timeout detects it\n')
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
        if received == FAILED or not is_first:
            time.sleep(_GRACE)
        if not self._is_closed:
            global_except_hook.abort_job(f'all processes of {host.text} have ended', '')


def _is_enabled() -> bool:
    return sys.platform == 'linux' and global_except_hook.aborts_job() and (
        _environment.flag(_environment.HOST_LINKS, default=True))


def addresses() -> list[str]:
    """Returns the addresses of the network interfaces, except those of loopback."""
    import fcntl  # there is none on Windows

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as file:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(file, _SIOCGIFADDR, struct.pack('256s', name.encode()))
                found.append(socket.inet_ntop(socket.AF_INET, answer[20:24]))
    with contextlib.suppress(OSError), open('/proc/net/if_inet6', encoding='utf-8') as lines:
        for line in lines:
            digits, _, _, scope, *_ = line.split()
            if scope == '00':  # global
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return [address for address in found if not address.startswith('127.')][:_MAX_ADDRESSES]


def listen() -> socket.socket:
    """Returns a socket that accepts connections from other hosts."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 can be disabled on all interfaces
            return socket.create_server(('', 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(('', 0))


def accept(listener: socket.socket, secret: bytes, timeout: float = _CONNECT_TIMEOUT
           ) -> socket.socket | None:
    """Returns the first connection of a client that knows the secret, and closes the listener.

    Others are dropped.  Returns ``None`` after the timeout.
    """
    deadline = time.monotonic() + timeout
    with listener:
        while (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                client, _ = listener.accept()
            except OSError:
                return None
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                stack.enter_context(client)
                _set_options(client)
                if _receives(client, secret[:_SECRET // 2], _HANDSHAKE_TIMEOUT):
                    client.sendall(secret[_SECRET // 2:])
                    stack.pop_all()
                    return client
    return None


def connect(offer: Offer, timeout: float = _CONNECT_TIMEOUT) -> socket.socket | None:
    """Returns a connection to the rank that made an offer.

    Returns ``None`` if none of its addresses is reachable, or it does not answer.
    """
    for address in offer.addresses:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            server = stack.enter_context(socket.create_connection(
                (address, offer.port), _HANDSHAKE_TIMEOUT))
            _set_options(server)
            server.sendall(offer.secret[:_SECRET // 2])
            if _receives(server, offer.secret[_SECRET // 2:], timeout):
                stack.pop_all()
                return server
    return None


def _receives(connection: socket.socket, expected: bytes, timeout: float) -> bool:
    """Receives these bytes; returns whether they are the expected ones."""
    received, deadline = b'', time.monotonic() + timeout
    while len(received) < len(expected):
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        more = connection.recv(len(expected) - len(received))
        if not more:
            return False
        received += more
    connection.settimeout(None)
    return hmac.compare_digest(received, expected)


def _set_options(link: socket.socket) -> None:
    """Lets the kernel close the connection when the other host does not answer."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_INTERVAL)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_INTERVAL)
    # Linux ignores the number of probes if there is this timeout, which also applies to data.  Half
    # an interval less, as timers are not exact.
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT,
                    1000 * _SILENCE - 500 * _PROBE_INTERVAL)
