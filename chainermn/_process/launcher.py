"""The launcher that started this process as a rank: mpiexec's process on this node.

MPICH's mpiexec, its derivatives, and Slurm (``--mpi=pmi2``) pass an open socket to each rank; its
number is in ``PMI_FD``. Until MPI_Init uses this socket, it is the only way to abort the job.
"""
from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import stat
import struct
import time

from chainermn._process import runtime

# Seconds.
_TIMEOUT = 1  # for a reply
_POLL_INTERVAL = .01

#: Variables with the rank, and with the rank within its node: MPICH, Open MPI.
_RANKS = (('PMI_RANK', 'MPI_LOCALRANKID'), ('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_LOCAL_RANK'))

_MAX_CLAIMS = 16


class _Claims(runtime.ProcessState):
    """The last claims of this process."""

    def __init__(self) -> None:
        self.sockets: dict[str, int] = {}  # by address

    def in_child(self) -> bool:
        return True


def is_connected() -> bool:
    """Return whether this process is a rank that can abort the job before MPI_Init."""
    with _connection() or contextlib.nullcontext() as connection:
        return connection is not None


def process() -> int:
    """Return the process ID of the launcher; 0 if it is unknown, as in some containers."""
    with _connection() or contextlib.nullcontext() as connection:
        return 0 if connection is None else peer(connection)[0]


def job() -> str:
    """Return an identifier of the job, which its ranks on this node share; '' if it is unknown."""
    return os.environ.get('PMIX_NAMESPACE') or str(process() or '')


def abort(status: int) -> None:
    """Ask the launcher to abort the job, as MPI_Abort does after MPI_Init.

    Args:
        status: The exit status of mpiexec.
    """
    with contextlib.suppress(OSError), _connection() or contextlib.nullcontext() as connection:
        if connection is not None:
            connection.settimeout(_TIMEOUT)
            connection.sendall(b'cmd=init pmi_version=1 pmi_subversion=1\n')
            connection.recv(1024)  # Slurm reads one command at a time
            connection.sendall(b'cmd=abort exitcode=%d\n' % status)


def claim(name: str) -> bool:
    """Claim a name; return whether this is the first rank of the job on this node that does so.

    The claim lasts until this process exits or has claimed many other names. If the launcher is
    unknown, or the check fails, the result is ``True`` on every rank.

    Args:
        name: The name, which may be any text.
    """
    if not (identifier := job()):
        return True
    # An abstract address does not leave a file behind, and containers can share it.
    parts = os.getuid(), _process_namespace(), identifier, name
    address = f'\0chainermn-{hashlib.sha256(repr(parts).encode()).hexdigest()}'
    sockets = runtime.get(_Claims).sockets
    if address in sockets:
        return True
    try:
        with socket.socket(socket.AF_UNIX) as claimed:
            claimed.bind(address)
            claimed.listen(4096)  # for _is_claimed
            sockets[address] = claimed.detach()
    except OSError as error:
        return error.errno != errno.EADDRINUSE or not _is_claimed(address)
    if len(sockets) > _MAX_CLAIMS:
        os.close(sockets.pop(next(iter(sockets))))
    return True


def _is_claimed(address: str) -> bool:
    """Return whether an address is bound by a process of this user, not of a different user."""
    deadline = time.monotonic() + _TIMEOUT
    with contextlib.suppress(OSError):
        while True:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.setblocking(False)
                try:
                    connection.connect(address)
                    return peer(connection)[1] == os.getuid()
                except ConnectionRefusedError:  # the process does not listen yet
                    if time.monotonic() > deadline:
                        return False
            time.sleep(_POLL_INTERVAL)
    return False


def _process_namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink('/proc/self/ns/pid')
    return ''


def is_on_first_node() -> bool:
    """Return whether this rank is on the node of rank 0, if ranks are assigned in order."""
    return all(os.environ.get(rank) == os.environ.get(local, os.environ.get(rank))
               for rank, local in _RANKS)


def _connection() -> socket.socket | None:
    """Return a duplicate of the socket ``PMI_FD``; ``None`` in processes that are not ranks.

    Children of a rank inherit the variable. In most of them, the number refers to no file, or to a
    different one, such as a socket of multiprocessing.
    """
    try:
        file = int(os.environ['PMI_FD'])
        if not stat.S_ISSOCK(os.fstat(file).st_mode):
            return None
        is_blocking = os.get_blocking(file)
        connection = socket.socket(fileno=os.dup(file))
        os.set_blocking(file, is_blocking)  # socket() changes it after socket.setdefaulttimeout
    except (KeyError, ValueError, OSError):
        return None
    if connection.family == socket.AF_UNIX and _is_launcher(peer(connection)[0]):
        return connection
    connection.close()
    return None


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the IDs of the process that created the other end (0 if unknown) and of its user."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        process, user, _ = struct.unpack('3i', credentials)
        return process, user
    return 0, -1


def _is_launcher(creator: int) -> bool:
    """Return whether the creator of the socket is the launcher of this process.

    The launcher starts the rank, possibly through a shell. A child of a rank can also inherit the
    socket, for example with os.system; it has a different Python process as its parent or an
    earlier ancestor.

    Args:
        creator: The ID of the process that created the socket; 0 if unknown, as in some containers.
    """
    process = os.getppid()
    with contextlib.suppress(OSError):  # not visible in a container
        while process not in (0, creator):
            if _is_different_program(process):
                return False
            with open(f'/proc/{process}/stat', 'rb') as file:
                process = int(file.read().rpartition(b')')[2].split()[1])
    return creator in (0, process)


def _is_different_program(process: int) -> bool:
    """Return whether a process runs the same Python with a different command line."""
    with contextlib.suppress(OSError):  # a process of another user
        if os.readlink(f'/proc/{process}/exe') == os.readlink('/proc/self/exe'):
            with open(f'/proc/{process}/cmdline', 'rb') as theirs, open(
                    '/proc/self/cmdline', 'rb') as ours:
                return theirs.read() != ours.read()
    return False
