"""A process of each node outlives the ranks there, to say which of them ended first, and why.

A rank that a signal ends says nothing, and mpiexec ends the others before they can.  So the first
rank of a node starts one more process, the witness, which waits for the processes of the ranks to
end (see `_witness_process`).  It ends with the last of them.
"""
from __future__ import annotations

import contextlib
import faulthandler
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
from typing import Any

from mpi4py import MPI

from chainermn import global_except_hook
from chainermn.communicators import _witness_process
from chainermn.communicators._recent import Calls

# Seconds.
_READY_WITHIN = 5
_ANSWERED_WITHIN = .5

_connection = -1  # file
_ready = -1  # file; written to once the witness that this rank has started is ready
_process = 0


def attend(mpi_comm: Any) -> None:
    """Starts a witness for the ranks on each node that have none.

    Collective: every rank calls it, and then :func:`wait_until_ready`.  Nothing happens on ranks
    where it is switched off, or where there can be none, as on other systems than Linux.
    """
    global _process
    here = (os.uname().nodename, _namespace()) if _is_wanted() else None
    rank = Calls(mpi_comm).ranks[mpi_comm.rank]
    said = mpi_comm.allgather((here, rank, os.getpid()))
    ranks = [(theirs, process) for there, theirs, process in said if there == here]
    address = ''
    if here is not None and ranks[0][0] == rank:
        with contextlib.suppress(OSError):
            address = _started(ranks, alone=len({there for there, _, _ in said}) == 1)
    addresses = mpi_comm.allgather(address)
    if here is not None:
        address = addresses[[theirs for _, theirs, _ in said].index(ranks[0][0])]
        with contextlib.suppress(OSError):
            _connect(address, rank)
            _process = os.getpid()
            os.register_at_fork(after_in_child=_forget)
            global_except_hook.may_speak = _may_speak


def wait_until_ready() -> None:
    """Waits for the witness that this rank has started, ahead of a collective of all ranks.

    Of several ranks that end before it looks, it could not say which was the first.
    """
    global _ready
    if _ready >= 0:
        select.select([_ready], [], [], _READY_WITHIN)
        os.close(_ready)
        _ready = -1


def say_goodbye() -> None:
    """Tells the witness that this rank has come to the end of its program."""
    _send(_witness_process.GOODBYE)


def _is_wanted() -> bool:
    return (_connection < 0 and sys.platform == 'linux' and hasattr(os, 'pidfd_open')
            and global_except_hook.ends_the_job())


def _namespace() -> str:
    """Processes of another one have other numbers."""
    with contextlib.suppress(OSError):
        return os.readlink('/proc/self/ns/pid') + os.readlink('/proc/self/ns/net')
    return str(os.getpid())


def _started(ranks: list[tuple[int, int]], alone: bool) -> str:
    """Starts the process; returns the address at which it listens already."""
    global _ready
    # Abstract: there is no file that anybody could open or that is left.
    address = f'\0chainermn-{secrets.token_hex(16)}'
    files: list[int] = []
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        listener.bind(address)
        listener.listen(len(ranks))
        # Opened here, while all are known to be there; the witness needs a moment to start.
        for _, process in ranks:
            files.append(os.pidfd_open(process))
            stack.callback(os.close, files[-1])
        known = [f'{rank}:{process}:{file}'
                 for (rank, process), file in zip(ranks, files, strict=True)]
        _ready, ready = os.pipe()
        files.append(ready)
        stack.callback(os.close, ready)
        command = [sys.executable, '-I', '-S', _witness_process.__file__, str(listener.fileno()),
                   str(ready), str(MPI.COMM_WORLD.size), str(int(alone)), *known]
        # The shell ends at once, so that the witness is no child that this rank might wait for.
        subprocess.run(['/bin/sh', '-c', '"$0" "$@" &', *command], check=True,
                       pass_fds=(listener.fileno(), *files), start_new_session=True,
                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return address


def _connect(address: str, rank: int) -> None:
    global _connection
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    connection.sendall(' '.join([str(rank), *global_except_hook.shared_memory()]).encode() + b'\n')
    _connection = connection.detach()  # open until the process has ended
    # Stacks go to the witness, which shows them with its message.
    if not faulthandler.is_enabled():
        faulthandler.enable(_connection)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            faulthandler.register(signal.SIGTERM, _connection, all_threads=False, chain=True)


def _forget() -> None:
    """A forked child is no rank."""
    global _connection
    if _connection >= 0:
        faulthandler.disable()
        faulthandler.unregister(signal.SIGTERM)
        os.close(_connection)
        _connection = -1


def _may_speak() -> bool:
    """Whether this rank is the first of its node to say why the job ends."""
    if _process == os.getpid() and _send(_witness_process.ASKS):
        with contextlib.suppress(OSError):
            if select.select([_connection], [], [], _ANSWERED_WITHIN)[0]:
                return os.read(_connection, 1) != _witness_process.NO
    return True


def _send(word: bytes) -> bool:
    if _connection >= 0 and _process == os.getpid():
        with contextlib.suppress(OSError):
            return os.write(_connection, word) > 0
    return False
