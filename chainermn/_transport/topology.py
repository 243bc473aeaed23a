"""The topology of a job: intra and inter ranks, derived from the host and cores of each rank."""
from __future__ import annotations

import collections
import os
from collections.abc import Sequence
from typing import NamedTuple

from chainermn._process import runtime
from chainermn._process.mpi import MPI


class Place(NamedTuple):
    """The host and cores of a rank."""

    host: str
    cores: int  # the cores on which it may run, as a bit mask


class Topology(NamedTuple):
    """The distribution of the ranks over nodes, from the view of one rank."""

    intra_rank: int
    intra_size: int
    inter_rank: int
    inter_size: int
    nodes: tuple[int, ...]  # the node of each rank
    is_oversubscribed: bool  # whether a node has more ranks than cores on which they may run

    @property
    def smallest_node(self) -> int:
        """The number of ranks of the smallest node."""
        return min(collections.Counter(self.nodes).values())


class _Oversubscription(runtime.ProcessState):
    """Records whether the ranks of a communicator of this process share cores."""

    def __init__(self) -> None:
        self.is_oversubscribed = False


def note_oversubscription(topology: Topology) -> bool:
    """Record whether ranks share cores; return whether any recorded topology has such ranks."""
    noted = runtime.get(_Oversubscription)
    noted.is_oversubscribed |= topology.is_oversubscribed
    return noted.is_oversubscribed


def here() -> Place:
    """Return the host and cores of this rank."""
    return Place(MPI.Get_processor_name(), sum(1 << core for core in cores()))


def of(rank: int, places: Sequence[Place]) -> Topology:
    """Return the topology from the view of a rank, given the place of each rank.

    Nodes are numbered in the order of their lowest ranks.

    >>> of(3, [Place('a', 1), Place('b', 1), Place('a', 2), Place('b', 1)])
    Topology(intra_rank=1, intra_size=2, inter_rank=1, inter_size=2, nodes=(0, 1, 0, 1), \
is_oversubscribed=True)
    """
    numbers: dict[str, int] = {}
    nodes = tuple(numbers.setdefault(host, len(numbers)) for host, _ in places)
    sizes = collections.Counter(nodes)
    available = dict.fromkeys(sizes, 0)
    for node, (_, mine) in zip(nodes, places, strict=True):
        available[node] |= mine
    return Topology(nodes[:rank].count(nodes[rank]), sizes[nodes[rank]], nodes[rank], len(sizes),
                    nodes, any(available[node].bit_count() < sizes[node] for node in sizes))


def discover(mpi_comm: MPI.Intracomm) -> Topology:
    """Gather the places of all ranks; return the topology. Collective: every rank calls it."""
    return of(mpi_comm.rank, mpi_comm.allgather(here()))


def cores() -> set[int]:
    """Return the cores on which this process may run."""
    if hasattr(os, 'sched_getaffinity'):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def are_cores_left(mpi_comm: MPI.Intracomm) -> bool:
    """Return whether the ranks of one node may run on more cores than there are ranks.

    Collective: every rank calls it.
    """
    return len(set().union(*mpi_comm.allgather(cores()))) > mpi_comm.size
