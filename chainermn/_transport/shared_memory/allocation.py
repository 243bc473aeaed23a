"""Allocation of shared memory: all ranks get it, or find out which rank cannot allocate it."""
from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable

import numpy as np

from chainermn._operations.ranks import group_ranks, ranks_text
from chainermn._process.mpi import MPI


def check_space(size: int) -> None:
    """Raise if ``/dev/shm`` has too little space for the window.

    Otherwise the first write to the window would kill the process; and some MPI libraries do not
    raise on the other ranks if allocation fails on one.  Nothing is written, since the other ranks
    of the node wait for this one.
    """
    if os.path.isdir('/dev/shm'):
        with tempfile.TemporaryFile(dir='/dev/shm') as file:
            os.ftruncate(file.fileno(), size)  # raises if this process may not create such files
            space = os.fstatvfs(file.fileno())
        free = space.f_bavail * space.f_frsize
        if space.f_blocks and free < size:  # it may have no limit
            raise OSError(errno.ENOSPC, f'/dev/shm has {free} bytes left, and {size} are needed')


def failures(mpi_comm: MPI.Comm, attempt: Callable[[], object]) -> str:
    """Call a function on all ranks; return the errors by rank, the same text on all ranks."""
    failure = ''
    try:
        attempt()
    except Exception as error:
        failure = (error.Get_error_string() if isinstance(error, MPI.Exception) else str(error)
                   ) or type(error).__name__
    # Almost always there is none, and it takes less time to find that out.
    has_failed = np.array([bool(failure)])
    mpi_comm.Allreduce(MPI.IN_PLACE, has_failed, MPI.LOR)
    if not has_failed[0]:
        return ''
    groups = group_ranks(enumerate(mpi_comm.allgather(failure)))
    return '; '.join(f'{ranks_text(ranks)} ({text})' for text, ranks in groups.items() if text)
