"""The connection of a rank to the node monitor of its node.

The first rank on a node starts the monitor with an open socket to which all ranks on the node
connect. Through this connection, ``global_except_hook`` asks the monitor whether this rank is the
first one on its node to report a failure.
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
from collections.abc import Sequence
from typing import NamedTuple

from chainermn import global_except_hook
from chainermn._diagnostics.node_monitor import monitor_process
from chainermn._operations import call_signature
from chainermn._process import launcher, runtime
from chainermn._process.mpi import MPI

# Seconds.
_READY_TIMEOUT = 5
_ANSWER_TIMEOUT = .5


class Registration(NamedTuple):
    """The information that each rank sends to the others, so that one of them can start a monitor.

    One rank on each node starts the monitor of the node.
    """

    node: int | None  # identifies the node; None if this rank has no monitor
    process: int
    launcher: int  # process ID of the launcher; 0 if it is unknown
    address: str  # the address at which a monitor started by this rank listens


class Connection(runtime.ProcessState):
    """The connection of this rank to the monitor."""

    def __init__(self) -> None:
        self.listener: socket.socket | None = None  # until the monitor has started
        self.file = -1  # not connected
        self.is_ready = False  # whether this rank has waited for the monitor

    def in_child(self) -> bool:
        if self.file >= 0:
            faulthandler.disable()
            faulthandler.unregister(signal.SIGTERM)
            os.close(self.file)
        return False


def _file() -> int:
    """Return the file descriptor of the connection; -1 if there is none."""
    return runtime.get(Connection).file


def prepare() -> Registration:
    """Return the information that the other ranks need in :func:`register`."""
    if not _is_enabled():
        return Registration(None, os.getpid(), 0, '')
    # An abstract socket has no file that others could open or that could be left behind.
    address = f'\0chainermn-{secrets.token_hex(16)}'
    # The ranks use the socket of the first rank, to which they can connect immediately.
    listener = runtime.get(Connection).listener = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(OSError):
        listener.bind(address)
        listener.listen(4096)
    return Registration(call_signature.digest((os.uname().nodename, _namespaces())), os.getpid(),
                        launcher.process(), address)


def register(rank: int, world: Sequence[int], registrations: Sequence[Registration]) -> None:
    """Start a node monitor for the ranks of each node that has none, and connect to it.

    Every rank calls it, and then :func:`wait_until_ready`. Nothing is started on ranks where the
    monitor is disabled or not supported, for example on systems other than Linux.

    Args:
        rank: This rank.
        world: The number of each rank in COMM_WORLD.
        registrations: The result of :func:`prepare` on each rank.
    """
    connection = runtime.get(Connection)
    listener, connection.listener = connection.listener, None
    if listener is None:
        return
    node = registrations[rank].node
    here = [(each, registration) for each, registration in zip(world, registrations, strict=True)
            if registration.node == node]
    first, (_, _, _, address) = here[0]
    with listener:
        if first == world[rank]:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                _start(listener, [(each, registration.process) for each, registration in here],
                       {registration.launcher for _, registration in here} - {0},
                       is_alone=len(here) == len(world))
    with contextlib.suppress(OSError):
        _connect(address, world[rank])
        global_except_hook.set_report_arbiter(_is_first)


def wait_until_ready() -> None:
    """Wait for the node monitor. Must be called before a collective of all ranks.

    If several ranks fail before the monitor polls them, it cannot tell which one failed first.
    """
    connection = runtime.get(Connection)
    if connection.file >= 0 and not connection.is_ready:
        connection.is_ready = True
        with contextlib.suppress(OSError):
            _answer(_READY_TIMEOUT)


def deregister() -> None:
    """Notify the node monitor that this rank has reached the end of the script."""
    _send(monitor_process.DEREGISTER)


def keep_open(file: int) -> None:
    """Give the monitor a socket that it keeps open until all ranks on this node have exited."""
    if _file() >= 0:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(_file())) as monitor:
            socket.send_fds(monitor, [monitor_process.KEEP_OPEN], [file])


def _is_enabled() -> bool:
    return (_file() < 0 and sys.platform == 'linux' and hasattr(os, 'pidfd_open')
            and global_except_hook.aborts_job())


def _namespaces() -> str:
    """Return an identifier of the process and network namespaces, which containers do not share."""
    with contextlib.suppress(OSError):
        return os.readlink('/proc/self/ns/pid') + os.readlink('/proc/self/ns/net')
    return str(os.getpid())


def _start(listener: socket.socket, ranks: list[tuple[int, int]], launchers: set[int],
           is_alone: bool) -> None:
    """Start the monitor.

    Args:
        listener: The socket to which the ranks connect.
        ranks: The ranks on this node, with their process IDs.
        launchers: The process IDs of their launchers, which outlive the ranks.
        is_alone: Whether all ranks are on this node.
    """
    with contextlib.ExitStack() as stack:
        # Open the pidfds here, where all processes are known to exist.
        files = []
        for process in (*(process for _, process in ranks), *launchers):
            files.append(os.pidfd_open(process))
            stack.callback(os.close, files[-1])
        arguments = [f'{rank}:{process}:{file}'
                     for (rank, process), file in zip(ranks, files, strict=False)]
        arguments += map(str, files[len(ranks):])
        command = [sys.executable, '-I', '-S', monitor_process.__file__, str(listener.fileno()),
                   str(MPI.COMM_WORLD.size), str(int(is_alone)), *arguments]
        # The shell exits immediately, so the monitor is not a child that this rank might wait for.
        subprocess.run(['/bin/sh', '-c', '"$0" "$@" &', *command], check=True,
                       pass_fds=(listener.fileno(), *files), start_new_session=True,
                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _connect(address: str, rank: int) -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    connection.sendall(' '.join([str(rank), *global_except_hook.shared_memory()]).encode() + b'\n')
    file = runtime.get(Connection).file = connection.detach()  # open until the process exits
    # faulthandler writes stacks to the monitor, which prints them after its message.
    if not faulthandler.is_enabled():
        faulthandler.enable(file)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            faulthandler.register(signal.SIGTERM, file, all_threads=False, chain=True)


def _is_first() -> bool:
    """Return whether this rank is the first one on its node to report a failure."""
    if _send(monitor_process.REQUEST):
        with contextlib.suppress(OSError):
            answer = _answer(_ANSWER_TIMEOUT)
            if answer == monitor_process.READY:  # this rank had not waited for it
                answer = _answer(_ANSWER_TIMEOUT)
            return answer != monitor_process.DENIED
    return True


def _answer(timeout: float) -> bytes:
    """Return a message from the monitor; empty after a timeout. Blocks in the kernel."""
    ready, _, _ = select.select([_file()], [], [], timeout)
    return os.read(_file(), 1) if ready else b''


def _send(message: bytes) -> bool:
    if _file() >= 0:
        with contextlib.suppress(OSError):
            return os.write(_file(), message) > 0
    return False
