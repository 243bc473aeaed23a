"""Connections between hosts: handshake, normal end, and what a lost connection means."""

import contextlib
import errno
import socket
import threading
import time

import pytest
from time_limits import seconds

from chainermn._diagnostics import host_links
from chainermn._diagnostics.host_links import Host, HostLinks, Offer

pytestmark = pytest.mark.mpi_skip

SECRET = bytes(range(32))


class Server(threading.Thread):
    """Accepts one connection."""

    def __init__(self, timeout=60):
        super().__init__(daemon=True)
        self.listener = host_links.listen()
        self.port = self.listener.getsockname()[1]
        self.timeout = timeout
        self.link = None
        self.start()

    def run(self):
        self.link = host_links.accept(self.listener, SECRET, self.timeout)

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
    return host_links.connect(server.offer()), server.result()


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
    with host_links.connect(server.offer('::1')), server.result():
        pass


@pytest.mark.parametrize('data', [
    b'GET / HTTP/1.1\r\nHost: node0\r\n\r\n', SECRET[:15] + b'x', SECRET[16:], b'\0' * 100_000])
def test_other_clients_are_dropped(data):
    server = Server()
    assert is_dropped(client(server, data[:16]))
    with host_links.connect(server.offer()), server.result():
        pass


def test_a_client_that_leaves_is_dropped():
    server = Server()
    client(server, SECRET[:5]).close()
    with host_links.connect(server.offer()), server.result():
        pass


@pytest.mark.parametrize('sent', [b'', SECRET[:15]])
def test_a_slow_client_is_dropped(monkeypatch, sent):
    monkeypatch.setattr(host_links, '_HANDSHAKE_TIMEOUT', .2)
    server = Server()
    slow = client(server, sent)
    assert is_dropped(slow)
    monkeypatch.undo()
    with host_links.connect(server.offer()), server.result():
        pass


def test_the_timeout_of_a_handshake_is_for_all_of_it(monkeypatch):
    monkeypatch.setattr(host_links, '_HANDSHAKE_TIMEOUT', .5)
    server, start = Server(), time.monotonic()
    with client(server) as slow, pytest.raises(OSError):
        for n in range(1000):
            slow.sendall(SECRET[n % 15:n % 15 + 1])
            time.sleep(.1)
    assert time.monotonic() < start + seconds(5)


def test_no_client_comes():
    assert Server(timeout=.1).result() is None


def test_a_server_that_answers_with_another_secret():
    with socket.create_server(('127.0.0.1', 0)) as other:
        offer = Offer(['127.0.0.1'], other.getsockname()[1], SECRET)
        found = []
        thread = threading.Thread(target=lambda: found.append(host_links.connect(offer)))
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
        assert host_links.connect(offer, timeout=.1) is None


def test_some_addresses_are_not_reachable():
    server = Server()
    with host_links.connect(server.offer('127.1.2.3.4', '0.0.0.256', '127.0.0.1')), server.result():
        pass


def test_no_address():
    assert host_links.connect(Offer([], 1, SECRET)) is None


def test_addresses_are_those_of_other_hosts():
    for address in host_links.addresses():
        family = socket.AF_INET6 if ':' in address else socket.AF_INET
        assert socket.inet_pton(family, address)
        assert address != '::1' and not address.startswith('127.')


def test_a_host_without_other_interfaces(monkeypatch):
    monkeypatch.setattr(socket, 'if_nameindex', lambda: [(1, 'lo'), (2, 'none')])
    assert all(':' in address for address in host_links.addresses())


class Ranks:
    """A communicator of the ranks on some hosts, of which this process is one."""

    def __init__(self, rank, offers=None):
        self.rank, self.offers = rank, offers

    def allgather(self, offer):
        assert self.offers is not None, 'no collective expected'
        return [offer if n == self.rank else each for n, each in enumerate(self.offers)]


@pytest.fixture(autouse=True)
def aborted(monkeypatch):
    """The reasons for which the job was aborted."""
    found = []
    monkeypatch.setattr(host_links.global_except_hook, 'aborts_job', lambda: True)
    monkeypatch.setattr(host_links.global_except_hook, 'abort_job',
                        lambda reason, _: found.append(reason))
    monkeypatch.setattr(host_links, 'world_ranks', lambda mpi_comm: tuple(range(9)))
    monkeypatch.setattr(host_links, '_GRACE', .1)
    return found


def wait_until(condition):
    end = time.monotonic() + seconds(20)
    while not condition():
        assert time.monotonic() < end
        time.sleep(.01)


def wait_until_closed(*all_links):
    wait_until(lambda: all(link.fileno() == -1 for links in all_links for link in links._links))


def two_hosts():
    """The links of both leaders of two hosts, which are in this process."""
    offers = []

    class Second(Ranks):
        def allgather(self, offer):
            offers.append(Offer(['127.0.0.1'], *offer[1:]))
            return [None, None, offers[0]]

    hosts = ['a', 'a', 'b']
    second = HostLinks(Second(2), hosts, True)
    first = HostLinks(Ranks(0, [None, None, offers[0]]), hosts, True)
    wait_until(lambda: first._links and second._links)
    return first, second


def test_one_host_has_no_links():
    assert HostLinks(Ranks(0), ['a', 'a'], True)._hosts == []


@pytest.mark.parametrize('rank, can_ask', [(1, True), (0, False)])
def test_ranks_without_links(rank, can_ask):
    links = HostLinks(Ranks(rank, [None, None, Offer([], 1, SECRET)]), ['a', 'a', 'b'], can_ask)
    assert links._hosts == [] and links.failure(None) == ''
    links.close()


def test_a_neighbor_that_offers_nothing():
    assert HostLinks(Ranks(0, [None, None]), ['a', 'b'], True)._hosts == []


def test_hosts_that_have_finished(aborted):
    first, second = two_hosts()
    first.close()
    second.close()
    wait_until_closed(first, second)
    assert aborted == [] and first.failure(None) == second.failure(None) == ''


@pytest.mark.parametrize('last', [b'', host_links.FAILED])
def test_a_host_whose_processes_have_ended(aborted, last):
    first, second = two_hosts()
    link, = first._links
    link.send(last)
    with contextlib.suppress(OSError):  # the other end has closed it
        link.shutdown(socket.SHUT_WR)
    wait_until_closed(first, second)
    wait_until(lambda: len(aborted) == 2)
    assert 'all processes of host a (ranks 0-1) have ended' in aborted


def test_a_lost_connection_of_a_host_that_answers_over_mpi(capsys):
    links = lost(errno.ETIMEDOUT)
    asked = []
    assert links.failure(asked.append) == '' and asked == [[1, 2]]
    links.answered(0)
    assert links.failure(asked.append) == '' and len(links._hosts) == 1
    links.answered(2)
    assert links.failure(asked.append) == '' and len(asked) == 1
    assert links._hosts == []
    assert 'host b (ranks 1-2) was lost (Connection timed out), but MPI' in capsys.readouterr().err


@pytest.mark.parametrize('number, why', [
    (errno.ETIMEDOUT, 'no answer for 24 s'), (errno.EHOSTUNREACH, 'no answer for 24 s'),
    (errno.ECONNRESET, 'Connection reset by peer')])
def test_a_host_that_does_not_answer_over_mpi(monkeypatch, number, why):
    monkeypatch.setattr(host_links, '_ANSWER_TIMEOUT', .1)
    monkeypatch.setattr(host_links, '_LONG_ANSWER_TIMEOUT', .15)
    links = lost(number)
    assert links.failure(lambda ranks: None) == ''
    time.sleep(.2)
    assert links.failure(None) == f'host b (ranks 1-2) is unreachable: {why}'


def lost(number):
    links = HostLinks(Ranks(0), ['a'], True)
    host = Host('b', [1, 2], [1, 2], True)
    host.error = number
    links._hosts.append(host)
    return links
