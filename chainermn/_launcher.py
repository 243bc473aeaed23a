"""The launcher that started this process as a rank: the process of mpiexec on this node.

MPICH's mpiexec, its relatives, and Slurm (``--mpi=pmi2``) pass a rank an open socket, whose number
is in ``PMI_FD``.  MPI_Init uses it later; until then, it is the only way to abort the job.
"""
from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys

_TIMEOUT = 1  # seconds for an answer

#: Variables with the rank, and with the rank among those of its node: MPICH, Open MPI.
_RANKS = (('PMI_RANK', 'MPI_LOCALRANKID'), ('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_LOCAL_RANK'))

#: Sockets by the names that this process has claimed; open until it exits.
_claims: dict[str, int] = {}


def is_connected() -> bool:
    """Return whether this process is a rank that can abort the job before MPI_Init."""
    with _connection() or contextlib.nullcontext() as connection:
        return connection is not None


def process() -> int:
    """Return the process ID of the launcher; 0 if it is unknown, as in some containers."""
    with _connection() or contextlib.nullcontext() as connection:
        creator = 0 if connection is None else _creator(connection)
    return creator if creator in _ancestors() else 0


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
    """Return whether this is the first rank of the job on this node that claims a name.

    It remains the first one until it exits.  If the launcher is unknown, every rank is the first.

    Args:
        name: The name.
    """
    job = os.environ.get('PMIX_NAMESPACE') or process()
    if not job or name in _claims:
        return True
    with socket.socket(socket.AF_UNIX) as claimed:
        try:
            # An abstract address: there is no file that might be left.  Containers can share it.
            namespace = os.readlink('/proc/self/ns/pid')
            claimed.bind(f'\0chainermn-{os.getuid()}-{namespace}-{job}-{name}')
        except OSError:
            return sys.platform != 'linux'
        _claims[name] = claimed.detach()
    return True


def is_on_first_node() -> bool:
    """Return whether this rank runs on the node of rank 0, if ranks are assigned in order."""
    return all(os.environ.get(rank) == os.environ.get(local, os.environ.get(rank))
               for rank, local in _RANKS)


def _connection() -> socket.socket | None:
    """Return the socket of ``PMI_FD``, duplicated; ``None`` in processes that are no ranks.

    Children of a rank inherit the variable.  In most of them the number belongs to no file, or to
    another one, such as a socket of multiprocessing.
    """
    children = sys.modules.get('multiprocessing.process')
    if children is not None and children.parent_process() is not None:
        return None
    try:
        file = int(os.environ['PMI_FD'])
        if not stat.S_ISSOCK(os.fstat(file).st_mode):
            return None
        connection = socket.socket(fileno=os.dup(file))
    except (KeyError, ValueError, OSError):
        return None
    if connection.family == socket.AF_UNIX and not _is_python(_creator(connection)):
        return connection
    connection.close()
    return None


def _creator(connection: socket.socket) -> int:
    """Return the ID of the process that created a socket; 0 if it is unknown."""
    with contextlib.suppress(AttributeError, OSError):  # other systems than Linux
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int(struct.unpack('3i', credentials)[0])
    return 0


def _ancestors() -> list[int]:
    """Return the IDs of the parent of this process, of its parent, and so on."""
    found = [os.getppid()]
    with contextlib.suppress(OSError):  # not visible in a container
        while found[-1] > 1:
            with open(f'/proc/{found[-1]}/stat', 'rb') as file:
                found.append(int(file.read().rpartition(b')')[2].split()[1]))
    return found


def _is_python(process: int) -> bool:
    """Return whether a process runs the same Python as this one, so that it is no launcher."""
    with contextlib.suppress(OSError):
        return os.readlink(f'/proc/{process}/exe') == os.readlink('/proc/self/exe')
    return False
