"""Exchanges slices of chunks between nodes with nonblocking messages.

Each exchange has three stages, some steps apart, so that several chunks are in flight while ranks
copy and add others: ``start``, ``combine`` and ``finish``.  All ranks call the stages of all chunks
in the same order.
"""
from __future__ import annotations

import itertools
import os
import time

import numpy as np

from chainermn._process.mpi import MPI

PART, SUM = 1, 2  # tags of messages
_POLLS = 20  # without yielding
_YIELDS = 20  # polls after a sched_yield each
_POLL_INTERVAL = 1e-4  # seconds between later polls
_PASSIVE_POLL_INTERVAL = 4e-4  # while the cores have other work


class NodeExchange:
    """The three stages of an exchange between nodes, on one rank of each.

    Args:
        inter: One rank of each node.
        waiting: Waits for requests.
    """

    def __init__(self, inter: MPI.Intracomm, waiting: Waiting) -> None:
        self._inter = inter
        self._waiting = waiting
        self._requests: list[MPI.Request] = []

    def start(self, scale: np.generic | None) -> None:
        """Start to send this node's slice, and to receive those of others."""

    def combine(self, scale: np.generic | None) -> None:
        """Wait for the slices of other nodes, and start to send the result, times ``scale``."""

    def finish(self) -> None:
        """Wait for the complete result."""
        self._waiting.wait(self._requests)


def split(inter: MPI.Intracomm, data: np.ndarray) -> tuple[list[np.ndarray], list[int]]:
    """Split a slice into a part per node; return the parts, and the other nodes.

    Each node begins with the next one, so that they do not all send to the same one first.
    """
    n = inter.size
    borders = [data.size * node // n for node in range(n + 1)]
    parts = [data[begin:end] for begin, end in itertools.pairwise(borders)]
    return parts, [(inter.rank + shift) % n for shift in range(1, n)]


class NodeSum(NodeExchange):
    """Sums a slice over all nodes, in the order of the nodes.

    Each node sums one part of the slice: the nodes send it their parts, and it sends them the sum.
    So a node sends and receives ``2 (n - 1) / n`` of the bytes for any number of nodes n, and all
    nodes get the same bits.

    Args:
        inter: One rank of each node.
        data: The slice of this node, which the sum replaces.
        received: Memory for the parts of other nodes: one element per node more than the slice.
        waiting: Waits for requests.
    """

    def __init__(self, inter: MPI.Intracomm, data: np.ndarray, received: np.ndarray,
                 waiting: Waiting) -> None:
        super().__init__(inter, waiting)
        n, me = inter.size, inter.rank
        parts, others = split(inter, data)
        self._own = own = parts[me]
        size = own.size
        self._parts = [(node, parts[node]) for node in others if parts[node].size]
        self._received = [(node, received[i * size:(i + 1) * size])
                          for i, node in enumerate(others) if size]
        by_node = dict(self._received) | {me: own}
        self._terms = [by_node[node] for node in range(n)] if size else []
        self._total = by_node[1 if me == 0 else 0] if size else own  # one of the first two terms

    def start(self, scale: np.generic | None) -> None:
        inter = self._inter
        self._requests = [inter.Irecv(part, node, PART) for node, part in self._received]
        self._requests += [inter.Isend(part, node, PART) for node, part in self._parts]

    def combine(self, scale: np.generic | None) -> None:
        self._waiting.wait(self._requests)
        inter, own = self._inter, self._own
        self._requests = [inter.Irecv(part, node, SUM) for node, part in self._parts]
        if self._terms:
            first, second, *others = self._terms
            total = np.add(first, second, self._total)
            for term in others:
                np.add(total, term, total)
            np.multiply(total, 1 if scale is None else scale, own)
            self._requests += [inter.Isend(own, node, SUM) for node, _ in self._received]


class NodeCopy(NodeExchange):
    """Copies data from one node to all others, along a chain.

    Args:
        inter: One rank of each node.
        data: The data; that of the root replaces the others.  It may be written to until
            ``combine``.
        waiting: Waits for requests.
        root: The node with the data.
    """

    def __init__(self, inter: MPI.Intracomm, data: np.ndarray, waiting: Waiting, root: int = 0
                 ) -> None:
        super().__init__(inter, waiting)
        position, n = (inter.rank - root) % inter.size, inter.size
        self._source = (inter.rank - 1) % n if position > 0 else None
        self._dest = (inter.rank + 1) % n if position < n - 1 else None
        self._data = data

    def start(self, scale: np.generic | None) -> None:
        if self._source is not None:
            self._requests = [self._inter.Irecv(self._data, self._source)]

    def combine(self, scale: np.generic | None) -> None:
        self._waiting.wait(self._requests)
        if self._dest is not None:
            self._requests = [self._inter.Isend(self._data, self._dest)]


class Waiting:
    """Waits for requests: polls briefly, then yields its core, then sleeps between polls.

    Attributes:
        is_passive: Whether to sleep after every poll, since this process has other work.
    """

    is_passive = False

    def wait(self, requests: list[MPI.Request]) -> None:
        """Wait for all requests, and empties the list."""
        polls = 0
        while not MPI.Request.Testall(requests):
            polls += 1
            if self.is_passive:
                time.sleep(_PASSIVE_POLL_INTERVAL)
            elif polls > _POLLS + _YIELDS:
                time.sleep(_POLL_INTERVAL)
            elif polls > _POLLS:
                os.sched_yield()
        requests.clear()
