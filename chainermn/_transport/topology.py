"""The topology: intra and inter ranks from the host name of each rank."""
from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from mpi4py import MPI


class Topology(NamedTuple):
    """The place of one rank among the nodes."""

    intra_rank: int
    intra_size: int
    inter_rank: int
    inter_size: int


def discover(mpi_comm: MPI.Intracomm) -> Topology:
    """Exchange host names.  Collective: every rank calls it."""
    return place(mpi_comm.rank, mpi_comm.allgather(MPI.Get_processor_name()))


def place(rank: int, hosts: Sequence[str]) -> Topology:
    """Place a rank, given the host of each rank.

    Nodes are numbered by the lowest rank they hold.

    >>> place(3, ['a', 'b', 'a', 'b'])
    Topology(intra_rank=1, intra_size=2, inter_rank=1, inter_size=2)
    """
    nodes = list(dict.fromkeys(hosts))
    mine = hosts[rank]
    return Topology(hosts[:rank].count(mine), hosts.count(mine), nodes.index(mine), len(nodes))


def cores() -> set[int]:
    """Return the cores on which this process may run."""
    if hasattr(os, 'sched_getaffinity'):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def are_cores_left(mpi_comm: MPI.Intracomm) -> bool:
    """Whether the ranks of one node may run on more cores than there are ranks.

    Collective: every rank calls it.
    """
    return len(set().union(*mpi_comm.allgather(cores()))) > mpi_comm.size
