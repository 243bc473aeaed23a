"""Settings of the process in which PyTorch computes: memory and threads.

Freed memory stays in the process for the next step. A training step frees all of its arrays, and
the next step allocates arrays of the same sizes. By default, glibc returns large blocks to the
kernel, which then has to provide and clear each page again. This takes up to a quarter of the time
of a step.

The number of threads is limited to the number of cores per rank; in a forked process, it is 1.
Without this limit, every rank on a host would start as many threads as the host has cores.
"""

from __future__ import annotations

import ctypes
import os

import torch

# Constants of glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

TRIM_THRESHOLD = 1 << 30  # bytes: at most this much free memory stays
MMAP_THRESHOLD = 1 << 25  # bytes; glibc's maximum: larger blocks are returned


def keep_memory() -> None:
    """Set these limits, unless environment variables of glibc set them, or there is no glibc."""
    if 'GLIBC_TUNABLES' in os.environ or any(name.startswith('MALLOC_') for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD)
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)


#: Variables with the number of ranks on this host, set by MPICH, Open MPI, MVAPICH and Cray.
LOCAL_RANKS = ('MPI_LOCALNRANKS', 'OMPI_COMM_WORLD_LOCAL_SIZE', 'MV2_COMM_WORLD_LOCAL_SIZE',
               'PMI_LOCAL_SIZE')


def limit_threads() -> None:
    """Set the number of threads, unless OMP_NUM_THREADS sets it."""
    # GNU's OpenMP cannot start threads in a process forked from one that did.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
    if 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), cores_of_rank()))


def cores_of_rank() -> int:
    """Return the number of cores for this rank, if all ranks of the host share its cores."""
    cores = len(os.sched_getaffinity(0))
    if cores < (os.cpu_count() or 1):  # the launcher has bound this rank to these cores
        return cores
    ranks = next((int(os.environ[name]) for name in LOCAL_RANKS
                  if os.environ.get(name, '').isdecimal()), 1)
    return max(cores // max(ranks, 1), 1)
