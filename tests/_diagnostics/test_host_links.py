"""Connections between hosts: their normal end, and the effects of a lost connection."""

import contextlib
import errno
import socket

import pytest
from time_limits import wait_until

from chainermn._diagnostics import host_links
from chainermn._diagnostics.host_links import Host, HostLinks
from chainermn._process.host_connection import Offer

pytestmark = pytest.mark.mpi_skip

SECRET = bytes(range(32))


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
    # A node monitor that another test has started would keep the links open.
    monkeypatch.setattr(host_links.node_monitor, 'keep_open', lambda file: None)
    return found


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
    assert links._hosts == [] and links.failure(None, 0) == ''
    links.close()


def test_a_neighbor_that_offers_nothing():
    assert HostLinks(Ranks(0, [None, None]), ['a', 'b'], True)._hosts == []


def test_hosts_that_have_finished(aborted):
    first, second = two_hosts()
    first.close()
    second.close()
    wait_until_closed(first, second)
    assert aborted == [] and first.failure(None, 0) == second.failure(None, 0) == ''


@pytest.mark.parametrize('last', [b'', host_links.FAILED])
def test_a_host_whose_processes_have_ended(aborted, last):
    first, second = two_hosts()
    link, = first._links
    link.send(last)
    with contextlib.suppress(OSError):  # the other end has closed it
        link.shutdown(socket.SHUT_WR)
    wait_until_closed(first, second)
    wait_until(lambda: len(aborted) == 2)
    assert 'all processes of host a (ranks 0-1) have exited' in aborted


def test_a_lost_connection_of_a_host_that_answers_over_mpi(capsys):
    links = lost(errno.ETIMEDOUT)
    asked = []
    assert links.failure(asked.append, 0) == '' and asked == [[1, 2]]
    links.answered(0)
    assert links.failure(asked.append, 0) == '' and len(links._hosts) == 1
    links.answered(2)
    assert links.failure(asked.append, 0) == '' and len(asked) == 1
    assert links._hosts == []
    assert 'host b (ranks 1-2) was lost (Connection timed out), but MPI' in capsys.readouterr().err


@pytest.mark.parametrize('number, why', [
    (errno.ETIMEDOUT, 'no response for 24 s'), (errno.EHOSTUNREACH, 'no response for 24 s'),
    (errno.ECONNRESET, 'Connection reset by peer')])
def test_a_host_that_does_not_answer_over_mpi(monkeypatch, number, why):
    monkeypatch.setattr(host_links, '_ANSWER_TIMEOUT', .1)
    monkeypatch.setattr(host_links, '_LONG_ANSWER_TIMEOUT', .15)
    links = lost(number)
    assert links.failure(lambda ranks: None, 0) == ''
    assert links.failure(None, .2) == f'host b (ranks 1-2) is unreachable: {why}'


def lost(number):
    links = HostLinks(Ranks(0), ['a'], True)
    host = Host('b', [1, 2], [1, 2], True)
    host.error = number
    links._hosts.append(host)
    return links
