"""The number of PyTorch's threads: the cores of this rank, one in forked processes.

Every rank of a job on a host would otherwise start as many threads as the host has cores.
"""

from __future__ import annotations

import os

import torch

#: Launchers' variables for the number of ranks on this host: MPICH, Open MPI, MVAPICH, Cray.
LOCAL_RANKS = ('MPI_LOCALNRANKS', 'OMPI_COMM_WORLD_LOCAL_SIZE', 'MV2_COMM_WORLD_LOCAL_SIZE',
               'PMI_LOCAL_SIZE')


def limit() -> None:
    """Set the number of threads, unless OMP_NUM_THREADS does."""
    # GNU's OpenMP cannot start threads in a process forked from one that did.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
    if 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), cores_of_rank()))


def cores_of_rank() -> int:
    """Return the number of cores that this process may use, with the other ranks of the host."""
    cores = len(os.sched_getaffinity(0))
    if cores < (os.cpu_count() or 1):  # the launcher bound this rank to its cores
        return cores
    ranks = next((int(os.environ[name]) for name in LOCAL_RANKS
                  if os.environ.get(name, '').isdecimal()), 1)
    return max(cores // max(ranks, 1), 1)
