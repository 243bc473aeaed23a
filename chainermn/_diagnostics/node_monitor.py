"""A process of each node outlives the ranks there, to say which of them ended first, and why.

A rank that a signal ends says nothing, and mpiexec ends the others before they can.  So the first
rank of a node starts one more process, the node monitor, which waits for the processes of the
ranks to end (see `node_monitor_process`).  It ends with the last of them.
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
from chainermn._diagnostics import node_monitor_process
from chainermn._diagnostics.flight_recorder import Calls

# Seconds.
_READY_WITHIN = 5
_ANSWERED_WITHIN = .5

_connection = -1  # file
_is_ready = False  # the node monitor, as far as this rank knows
_process = 0


def attend(mpi_comm: Any) -> None:
    """Starts a node monitor for the ranks on each node that have none.

    Collective: every rank calls it, and then :func:`wait_until_ready`.  Nothing happens on ranks
    where it is switched off, or where there can be none, as on other systems than Linux.
    """
    global _process
    here = (os.uname().nodename, _namespace()) if _is_wanted() else None
    rank = Calls(mpi_comm).ranks[mpi_comm.rank]
    # Abstract: there is no file that anybody could open or that is left.
    address = f'\0chainermn-{secrets.token_hex(16)}'
    with socket.socket(socket.AF_UNIX) as listener:
        if here is not None:  # that of the first rank will be used, and the others know it at once
            with contextlib.suppress(OSError):
                listener.bind(address)
                listener.listen(4096)
        said = mpi_comm.allgather((here, rank, os.getpid(), address))
        ranks = [(theirs, process) for there, theirs, process, _ in said if there == here]
        if here is not None and ranks[0][0] == rank:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                _start(listener, ranks, alone=len({there for there, *_ in said}) == 1)
    if here is not None:
        with contextlib.suppress(OSError):
            _connect(next(theirs for there, *_, theirs in said if there == here), rank)
            _process = os.getpid()
            os.register_at_fork(after_in_child=_forget)
            global_except_hook.may_speak = _may_speak


def wait_until_ready() -> None:
    """Waits for the node monitor, ahead of a collective of all ranks.

    Of several ranks that end before it looks, it could not say which was the first.
    """
    global _is_ready
    if _connection >= 0 and not _is_ready:
        _is_ready = True
        with contextlib.suppress(OSError):
            _answer(_READY_WITHIN)


def say_goodbye() -> None:
    """Tells the node monitor that this rank has reached the end of its program."""
    _send(node_monitor_process.GOODBYE)


def _is_wanted() -> bool:
    return (_connection < 0 and sys.platform == 'linux' and hasattr(os, 'pidfd_open')
            and global_except_hook.ends_the_job())


def _namespace() -> str:
    """Processes of another one have other numbers."""
    with contextlib.suppress(OSError):
        return os.readlink('/proc/self/ns/pid') + os.readlink('/proc/self/ns/net')
    return str(os.getpid())


def _start(listener: socket.socket, ranks: list[tuple[int, int]], alone: bool) -> None:
    """Starts the process."""
    with contextlib.ExitStack() as stack:
        # Opened here, while all are known to be there; the node monitor needs a moment to start.
        files = []
        for _, process in ranks:
            files.append(os.pidfd_open(process))
            stack.callback(os.close, files[-1])
        known = [f'{rank}:{process}:{file}'
                 for (rank, process), file in zip(ranks, files, strict=True)]
        command = [sys.executable, '-I', '-S', node_monitor_process.__file__,
                   str(listener.fileno()),
                   str(MPI.COMM_WORLD.size), str(int(alone)), *known]
        # The shell ends at once: the node monitor is no child that this rank might wait for.
        subprocess.run(['/bin/sh', '-c', '"$0" "$@" &', *command], check=True,
                       pass_fds=(listener.fileno(), *files), start_new_session=True,
                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _connect(address: str, rank: int) -> None:
    global _connection
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    connection.sendall(' '.join([str(rank), *global_except_hook.shared_memory()]).encode() + b'\n')
    _connection = connection.detach()  # open until the process has ended
    # Stacks go to the node monitor, which shows them with its message.
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
    if _process == os.getpid() and _send(node_monitor_process.ASKS):
        with contextlib.suppress(OSError):
            answer = _answer(_ANSWERED_WITHIN)
            if answer == node_monitor_process.READY:  # nobody has waited for that
                answer = _answer(_ANSWERED_WITHIN)
            return answer != node_monitor_process.NO
    return True


def _answer(within: float) -> bytes:
    """What the node monitor says, or nothing.  Without a core, which it needs to start."""
    ready, _, _ = select.select([_connection], [], [], within)
    return os.read(_connection, 1) if ready else b''


def _send(word: bytes) -> bool:
    if _connection >= 0 and _process == os.getpid():
        with contextlib.suppress(OSError):
            return os.write(_connection, word) > 0
    return False
