"""Connections between hosts: the handshake, and its failures."""

import socket
import threading
import time

import pytest
from time_limits import seconds

from chainermn._process import host_connection
from chainermn._process.host_connection import Offer

pytestmark = pytest.mark.mpi_skip

SECRET = bytes(range(32))


class Server(threading.Thread):
    """Accepts one connection."""

    def __init__(self, timeout=60):
        super().__init__(daemon=True)
        self.listener = host_connection.listen()
        self.port = self.listener.getsockname()[1]
        self.timeout = timeout
        self.link = None
        self.start()

    def run(self):
        self.link = host_connection.accept(self.listener, SECRET, self.timeout)

    def result(self):
        self.join(seconds(20))
        assert not self.is_alive() and self.listener.fileno() == -1
        return self.link

    def offer(self, *addresses, secret=SECRET):
        return Offer(addresses or ('127.0.0.1',), self.port, secret)


def client(server, data=b''):
    connection = socket.create_connection(('127.0.0.1', server.port), seconds(20))
    connection.sendall(data)
    return connection


def is_dropped(connection):
    with connection:
        try:
            return connection.recv(1) == b''
        except ConnectionResetError:
            return True


def connected():
    server = Server()
    return host_connection.connect(server.offer()), server.result()


def test_a_connection():
    here, there = connected()
    with here, there:
        here.send(b'x')
        assert there.recv(1) == b'x'
        for link in (here, there):
            assert link.gettimeout() is None
            assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 4
            assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 22_000


def test_over_ipv6():
    server = Server()
    if server.listener.family != socket.AF_INET6:
        pytest.skip('needs IPv6')
    with host_connection.connect(server.offer('::1')), server.result():
        pass


@pytest.mark.parametrize('data', [
    b'GET / HTTP/1.1\r\nHost: node0\r\n\r\n', SECRET[:15] + b'x', SECRET[16:], b'\0' * 100_000])
def test_other_clients_are_dropped(data):
    server = Server()
    assert is_dropped(client(server, data[:16]))
    with host_connection.connect(server.offer()), server.result():
        pass


def test_a_client_that_leaves_is_dropped():
    server = Server()
    client(server, SECRET[:5]).close()
    with host_connection.connect(server.offer()), server.result():
        pass


@pytest.mark.parametrize('sent', [b'', SECRET[:15]])
def test_a_slow_client_is_dropped(monkeypatch, sent):
    monkeypatch.setattr(host_connection, '_HANDSHAKE_TIMEOUT', .2)
    server = Server()
    slow = client(server, sent)
    assert is_dropped(slow)
    monkeypatch.undo()
    with host_connection.connect(server.offer()), server.result():
        pass


def test_the_timeout_applies_to_the_entire_handshake(monkeypatch):
    monkeypatch.setattr(host_connection, '_HANDSHAKE_TIMEOUT', .5)
    server, start = Server(), time.monotonic()
    with client(server) as slow, pytest.raises(OSError):
        for n in range(1000):
            slow.sendall(SECRET[n % 15:n % 15 + 1])
            time.sleep(.1)
    assert time.monotonic() < start + seconds(5)


def test_no_client_connects():
    assert Server(timeout=.1).result() is None


def test_a_server_that_answers_with_another_secret():
    with socket.create_server(('127.0.0.1', 0)) as other:
        offer = Offer(['127.0.0.1'], other.getsockname()[1], SECRET)
        found = []
        thread = threading.Thread(target=lambda: found.append(host_connection.connect(offer)))
        thread.start()
        connection, _ = other.accept()
        with connection:
            assert connection.recv(100) == SECRET[:16]
            connection.sendall(bytes(16))
            thread.join(seconds(20))
    assert found == [None]


def test_a_server_that_does_not_answer():
    with socket.create_server(('127.0.0.1', 0)) as other:
        offer = Offer(['127.0.0.1'], other.getsockname()[1], SECRET)
        assert host_connection.connect(offer, timeout=.1) is None


def test_unreachable_addresses_of_a_parsed_offer_are_skipped():
    server = Server()
    offer = server.offer('127.1.2.3.4', '0.0.0.256', '127.0.0.1')
    with host_connection.connect(Offer.parse(str(offer))), server.result():
        pass


def test_no_address():
    assert host_connection.connect(Offer([], 1, SECRET)) is None


def test_addresses_are_reachable_from_other_hosts():
    for address in host_connection.addresses():
        family = socket.AF_INET6 if ':' in address else socket.AF_INET
        assert socket.inet_pton(family, address)
        assert address != '::1' and not address.startswith('127.')


def test_a_host_without_other_interfaces(monkeypatch):
    monkeypatch.setattr(socket, 'if_nameindex', lambda: [(1, 'lo'), (2, 'none')])
    assert all(':' in address for address in host_connection.addresses())
