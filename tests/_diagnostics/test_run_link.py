"""The connection of a rank to the command that started its job."""

import contextlib
import socket
import struct
import threading

import pytest
from time_limits import seconds

from chainermn._commands.run.job_links import Links
from chainermn._diagnostics import run_link
from chainermn._process.host_connection import Offer

pytestmark = pytest.mark.mpi_skip


def test_a_lost_connection_is_restored_until_the_command_ends(monkeypatch):
    monkeypatch.setattr(run_link, '_PAUSE', .01)
    first = []  # addresses
    connect = run_link.host_connection.connect
    monkeypatch.setattr(run_link.host_connection, 'connect', lambda offer: (
        first.append(offer.addresses[0]), connect(offer))[1])
    with contextlib.closing(Links(2)) as links:
        offer = links.offer._replace(addresses=['240.0.0.1', '127.0.0.1'])  # no host has that one
        rank = threading.Thread(target=run_link._run, args=(offer, 2), daemon=True)
        rank.start()
        while not links.are_complete:
            links.poll()
        link, = links._handshakes
        # RST instead of FIN, as after a failure of the network
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        links._drop(link)
        links.poll()
        assert not links.are_complete
        while not links.are_complete:
            links.poll()
    rank.join(seconds(20))
    assert not rank.is_alive() and first == ['240.0.0.1', '127.0.0.1']


def test_a_rank_that_cannot_connect_gives_up(monkeypatch, capsys):
    monkeypatch.setenv('CHAINERMN_DEBUG', '1')
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
    run_link._run(Offer(['127.0.0.1'], port, bytes(32)), 2)
    assert 'no network connection from ' in capsys.readouterr().err
