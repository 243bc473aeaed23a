"""TCP connections between hosts, authenticated by a shared secret, that show when a host is lost.

Both ends prove that they know the secret: the client sends the first half, and the server replies
with the second half. The kernel closes a connection if the other host has not responded for
``SILENCE`` seconds, even if nothing is sent.
"""
from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

# Seconds.
_PROBE_INTERVAL = 4
SILENCE = 6 * _PROBE_INTERVAL
_CONNECT_TIMEOUT = 600.  # long, because a rank may hold the GIL after startup
_HANDSHAKE_TIMEOUT = 10.

_MAX_ADDRESSES = 16
_SECRET = 32  # bytes
_SIOCGIFADDR = 0x8915


class Offer(NamedTuple):
    """The addresses at which a process accepts connections."""

    addresses: Sequence[str]
    port: int
    secret: bytes

    @classmethod
    def parse(cls, text: str) -> Offer:
        """Parse the text of an offer."""
        port, secret, *addresses = text.split()
        return cls(addresses, int(port), bytes.fromhex(secret))

    def __str__(self) -> str:
        return ' '.join([str(self.port), self.secret.hex(), *self.addresses])


class Handshake:
    """The server's side of the handshake with one client.

    Args:
        client: A new connection, which may be non-blocking.
        secret: The secret.
    """

    def __init__(self, client: socket.socket, secret: bytes) -> None:
        #: Whether the client has proved that it knows the secret.
        self.is_complete = False
        self._client = client
        self._question, self._answer = _halves(secret)
        self._received = b''

    def read(self) -> bool:
        """Read once from the client, and reply if that completes its half of the secret.

        Returns:
            Whether to keep the connection: ``False`` if the client has closed it or has sent
            something else.
        """
        more = self._client.recv(len(self._question) - len(self._received))
        self._received += more
        if len(self._received) < len(self._question):
            return bool(more)
        self.is_complete = hmac.compare_digest(self._received, self._question)
        if self.is_complete:
            self._client.sendall(self._answer)
        return self.is_complete


def new_secret() -> bytes:
    """Return a random secret."""
    return secrets.token_bytes(_SECRET)


def _halves(secret: bytes) -> tuple[bytes, bytes]:
    """Return the half that the client sends and the half that the server replies with."""
    return secret[:_SECRET // 2], secret[_SECRET // 2:]


def addresses() -> list[str]:
    """Return the addresses of the network interfaces, except the loopback interface."""
    import fcntl  # not available on Windows

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as file:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no IPv4 address
                answer = fcntl.ioctl(file, _SIOCGIFADDR, struct.pack('256s', name.encode()))
                found.append(socket.inet_ntop(socket.AF_INET, answer[20:24]))
    with contextlib.suppress(OSError), open('/proc/net/if_inet6', encoding='utf-8') as lines:
        for line in lines:
            digits, _, _, scope, *_ = line.split()
            if scope == '00':  # global
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return [address for address in found if not address.startswith('127.')][:_MAX_ADDRESSES]


def listen() -> socket.socket:
    """Return a socket that accepts connections from other hosts."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 can be disabled on all interfaces
            return socket.create_server(('', 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(('', 0))


def accept(listener: socket.socket, secret: bytes, timeout: float = _CONNECT_TIMEOUT
           ) -> socket.socket | None:
    """Return the first connection of a client that knows the secret, and close the listener.

    Other connections are dropped. Return ``None`` after the timeout.
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
                set_options(client)
                client.settimeout(_HANDSHAKE_TIMEOUT)
                handshake, until = Handshake(client, secret), time.monotonic() + _HANDSHAKE_TIMEOUT
                while handshake.read():
                    if handshake.is_complete:
                        client.settimeout(None)
                        stack.pop_all()
                        return client
                    client.settimeout(max(until - time.monotonic(), 1e-3))
    return None


def connect(offer: Offer, timeout: float = _CONNECT_TIMEOUT) -> socket.socket | None:
    """Return a connection to the process that made an offer.

    Return ``None`` if none of its addresses is reachable or the process does not reply.
    """
    for address in offer.addresses:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            server = stack.enter_context(socket.create_connection(
                (address, offer.port), _HANDSHAKE_TIMEOUT))
            set_options(server)
            question, answer = _halves(offer.secret)
            server.sendall(question)
            if _receives(server, answer, timeout):
                stack.pop_all()
                return server
    return None


def _receives(connection: socket.socket, expected: bytes, timeout: float) -> bool:
    """Receive as many bytes as expected; return whether they are the expected ones."""
    received, deadline = b'', time.monotonic() + timeout
    while len(received) < len(expected):
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        more = connection.recv(len(expected) - len(received))
        if not more:
            return False
        received += more
    connection.settimeout(None)
    return hmac.compare_digest(received, expected)


def set_options(link: socket.socket) -> None:
    """Make the kernel close the connection if the other host no longer responds."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_INTERVAL)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_INTERVAL)
    # With this timeout, which also applies to data, Linux ignores the number of probes. Subtract
    # half an interval, because timers are not exact.
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT,
                    1000 * SILENCE - 500 * _PROBE_INTERVAL)
