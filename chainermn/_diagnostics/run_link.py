"""The run link: a connection from each host to ``chainermn run`` while its ranks run.

Without this link, the command only knows whether it can start new processes on the host.
"""
from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence

from chainermn._diagnostics import thread_state
from chainermn._process import environment, host_connection, streams
from chainermn._process.host_connection import Offer
from chainermn._process.mpi import MPI

_PAUSE = 10  # seconds between a lost connection and the next attempt


def connect(mpi_comm: MPI.Intracomm, hosts: Sequence[str]) -> None:
    """Connect the lowest rank of each host, in a thread, if the communicator contains all ranks.

    Args:
        mpi_comm: The communicator.
        hosts: The host name of each rank.
    """
    text = environment.text(environment.RUN_LINK)
    here = hosts[mpi_comm.rank]
    if text and mpi_comm.size == MPI.COMM_WORLD.size and hosts.index(here) == mpi_comm.rank:
        threading.Thread(target=_run, args=(Offer.parse(text), hosts.count(here)), daemon=True,
                         name=f'{thread_state.HOST_LINK} to chainermn run').start()


def _run(offer: Offer, n_ranks: int) -> None:
    """Keep a connection open and send the number of ranks on this host over it."""
    link = host_connection.connect(offer)
    if link is None and environment.flag(environment.DEBUG):
        streams.write(f'chainermn: no network connection from {os.uname().nodename} to chainermn '
                      'run, so chainermn run relies on new logins to this host\n')
    while link is not None:
        # Python 3.14 crashes if the variable of a with statement is reassigned inside it.
        with contextlib.suppress(OSError), link:
            # Try this address first when reconnecting, because others may not respond.
            offer = offer._replace(addresses=[link.getpeername()[0], *offer.addresses])
            link.sendall(n_ranks.to_bytes(4, 'big'))
            link.recv(1)  # blocks in the kernel
            return  # the command has exited
        link = None
        while link is None:
            time.sleep(_PAUSE)
            link = host_connection.connect(offer)
