"""The connections of an attempt: one from each host of the job, while its ranks run."""
from __future__ import annotations

import contextlib
import selectors
import socket

from chainermn._process import host_connection
from chainermn._process.host_connection import Handshake, Offer

_NUMBER = 4  # bytes: the number of ranks on a host, which follows the secret
_MAX_STRANGERS = 100  # connections that have not yet sent the secret


class Links:
    """Accepts a connection from the lowest rank of each host.

    The kernel closes the connection to a host that does not respond.

    Args:
        n_ranks: The number of ranks of the job.
    """

    def __init__(self, n_ranks: int) -> None:
        self.are_complete = False  # whether the hosts of all ranks are connected
        #: Whether a connection has failed since all connections were last open. A clean close does
        #: not count.
        self.has_lost_host = False
        self._n_ranks = n_ranks
        self._listener = host_connection.listen()
        self._listener.setblocking(False)
        self._secret = host_connection.new_secret()
        self.offer = Offer([*host_connection.addresses(), '127.0.0.1', '::1'],
                           self._listener.getsockname()[1], self._secret)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._handshakes: dict[socket.socket, Handshake] = {}
        self._numbers: dict[socket.socket, bytes] = {}  # the bytes after the handshake

    def close(self) -> None:
        """Close all connections."""
        self._selector.close()
        for link in (self._listener, *self._handshakes):
            link.close()

    def poll(self) -> None:
        """Accept and read connections, without waiting."""
        for key, _ in self._selector.select(0):
            link = key.fileobj
            assert isinstance(link, socket.socket)
            if link is self._listener:
                with contextlib.suppress(OSError):  # a lost client, or too many open files
                    self._accept()
            elif not self._receive(link):
                self._drop(link)
        self.are_complete = self._n_ranks <= sum(
            int.from_bytes(number, 'big') for number in self._numbers.values()
            if len(number) == _NUMBER)
        if self.are_complete:
            self.has_lost_host = False

    def _accept(self) -> None:
        link, _ = self._listener.accept()
        link.setblocking(False)
        host_connection.set_options(link)
        self._handshakes[link], self._numbers[link] = Handshake(link, self._secret), b''
        self._selector.register(link, selectors.EVENT_READ)
        strangers = [link for link, handshake in self._handshakes.items()
                     if not handshake.is_complete]
        if len(strangers) > _MAX_STRANGERS:
            self._drop(strangers[0])

    def _receive(self, link: socket.socket) -> bool:
        """Read from a connection; return whether to keep it."""
        handshake = self._handshakes[link]
        try:
            if not handshake.is_complete:
                return handshake.read()
            # Read at least one byte, to notice when the connection is closed.
            more = link.recv(max(_NUMBER - len(self._numbers[link]), 1))
            self._numbers[link] += more
            return bool(more)
        except OSError:
            self.has_lost_host |= handshake.is_complete
            return False

    def _drop(self, link: socket.socket) -> None:
        del self._handshakes[link], self._numbers[link]
        self._selector.unregister(link)
        link.close()
