"""Transfers slices of chunks between nodes with nonblocking messages.

Each transfer has three phases, some steps apart, so that several chunks are in flight while ranks
copy and add others: ``start``, ``combine`` and ``finish``. All ranks call the phases of all chunks
in the same order.
"""
from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence

import numpy as np

from chainermn._process.mpi import MPI

PART, SUM = 1, 2  # tags of messages
_POLLS = 20  # without yielding
_YIELDS = 20  # further polls, each after a sched_yield
_POLL_INTERVAL = 1e-4  # seconds between later polls
_PASSIVE_POLL_INTERVAL = 2e-3  # while the cores have other work
#: Seconds. A poll that takes longer has moved data (about 60 KB), so the next one may move more.
_IDLE_POLL = 5e-6
_BUSY_POLLS = 64  # maximum number of polls without a pause


class NodeTransfer:
    """The three phases of a transfer between nodes, on one rank of each node.

    Args:
        inter: A communicator with one rank of each node.
        waiting: The object that waits for requests.
    """

    def __init__(self, inter: MPI.Intracomm, waiting: Waiting) -> None:
        self._inter = inter
        self._waiting = waiting
        self._requests: list[MPI.Request] = []

    def start(self, scale: np.generic | None) -> None:
        """Start to send this node's slice and to receive the slices of other nodes."""

    def combine(self, scale: np.generic | None) -> None:
        """Wait for the slices of other nodes; start to send the result, multiplied by ``scale``."""

    def finish(self) -> None:
        """Wait for the complete result."""
        self._waiting.wait(self._requests)


def split(inter: MPI.Intracomm, data: np.ndarray) -> tuple[list[np.ndarray], list[int]]:
    """Split a slice into one part per node; return the parts and the numbers of the other nodes."""
    n = inter.size
    borders = [data.size * node // n for node in range(n + 1)]
    return [data[begin:end] for begin, end in itertools.pairwise(borders)], _others(inter)


def _raw(part: np.ndarray) -> np.ndarray:
    """Return data as bytes for MPI, because a user's array may be unaligned."""
    return part.view(np.uint8)


def _others(inter: MPI.Intracomm) -> list[int]:
    """Return the other nodes, starting with the next one, so that the nodes start differently."""
    return [(inter.rank + shift) % inter.size for shift in range(1, inter.size)]


class NodeReduction(NodeTransfer):
    """Sums a part of a slice on each node, in the order of the nodes.

    All other nodes send their values of a part to the node that sums it. So with n nodes, each node
    sends and receives ``(n - 1) / n`` of the bytes.

    Args:
        inter: A communicator with one rank of each node.
        parts: The part of the slice for each node.
        received: Memory for the parts of other nodes.
        waiting: The object that waits for requests.
        result: The array for the sum of this node's part; ``None`` for that part itself.
    """

    def __init__(self, inter: MPI.Intracomm, parts: Sequence[np.ndarray], received: np.ndarray,
                 waiting: Waiting, result: np.ndarray | None = None) -> None:
        super().__init__(inter, waiting)
        n, me = inter.size, inter.rank
        others = _others(inter)
        own = parts[me]
        self._result = own if result is None else result
        size = own.size
        self._parts = [(node, _raw(parts[node])) for node in others if parts[node].size]
        terms = {node: received[i * size:(i + 1) * size]
                 for i, node in enumerate(others) if size}
        self._received = [(node, _raw(part)) for node, part in terms.items()]
        by_node = terms | {me: own}
        self._terms = [by_node[node] for node in range(n)] if size else []
        self._total = by_node[1 if me == 0 else 0] if size else own  # one of the first two terms

    def start(self, scale: np.generic | None) -> None:
        inter = self._inter
        self._requests = [inter.Irecv(part, node, PART) for node, part in self._received]
        self._requests += [inter.Isend(part, node, PART) for node, part in self._parts]

    def combine(self, scale: np.generic | None) -> None:
        self._waiting.wait(self._requests)
        if self._terms:
            first, second, *others = self._terms
            total = np.add(first, second, self._total)
            for term in others:
                np.add(total, term, total)
            np.multiply(total, 1 if scale is None else scale, self._result)


class NodeSum(NodeReduction):
    """Sums a slice over all nodes: each node sums one part and sends it to the others.

    So with n nodes, each node sends and receives ``2 (n - 1) / n`` of the bytes, and the results
    are bitwise identical on all nodes.

    Args:
        inter: A communicator with one rank of each node.
        data: The slice of this node.
        received: Memory for the parts of other nodes: as large as the slice, plus one element per
            node.
        waiting: The object that waits for requests.
        result: The array for the sum, which is written from ``combine`` on; ``None`` for ``data``
            itself.
    """

    def __init__(self, inter: MPI.Intracomm, data: np.ndarray, received: np.ndarray,
                 waiting: Waiting, result: np.ndarray | None = None) -> None:
        parts, others = split(inter, data)
        results = parts if result is None else split(inter, result)[0]
        super().__init__(inter, parts, received, waiting, results[inter.rank])
        self._sums = [(node, _raw(results[node])) for node in others if results[node].size]

    def combine(self, scale: np.generic | None) -> None:
        super().combine(scale)
        inter, own = self._inter, _raw(self._result)
        self._requests = [inter.Irecv(part, node, SUM) for node, part in self._sums]
        self._requests += [inter.Isend(own, node, SUM) for node, _ in self._received]


class NodeGather(NodeTransfer):
    """Copies a part of a slice from each node to all others.

    Args:
        inter: A communicator with one rank of each node.
        parts: The part of the slice of each node. This node's part may be modified until
            ``combine``.
        waiting: The object that waits for requests.
    """

    def __init__(self, inter: MPI.Intracomm, parts: Sequence[np.ndarray], waiting: Waiting
                 ) -> None:
        super().__init__(inter, waiting)
        self._own = parts[inter.rank]
        self._parts = [(node, parts[node]) for node in _others(inter)]

    def start(self, scale: np.generic | None) -> None:
        self._requests = [self._inter.Irecv(part, node, SUM)
                          for node, part in self._parts if part.size]

    def combine(self, scale: np.generic | None) -> None:
        if self._own.size:
            self._requests += [self._inter.Isend(self._own, node, SUM) for node, _ in self._parts]


class NodeCopy(NodeTransfer):
    """Copies data from one node to all others, along a chain.

    Args:
        inter: A communicator with one rank of each node.
        data: The data. On other nodes, the root's data replaces it; on the root, it may be modified
            until ``combine``.
        waiting: The object that waits for requests.
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
        is_passive: Whether to sleep after every poll, because this process has other work.
    """

    is_passive = False

    def wait(self, requests: list[MPI.Request]) -> None:
        """Wait for all requests, then empty the list."""
        polls = 0
        while not _are_complete(requests):
            polls += 1
            if self.is_passive:
                time.sleep(_PASSIVE_POLL_INTERVAL)
            elif polls > _POLLS + _YIELDS:
                time.sleep(_POLL_INTERVAL)
            elif polls > _POLLS:
                os.sched_yield()
        requests.clear()


def _are_complete(requests: list[MPI.Request]) -> bool:
    """Poll requests as long as polling moves data; return whether all requests are complete."""
    start = time.perf_counter()
    for _ in range(_BUSY_POLLS):
        if MPI.Request.Testall(requests):
            return True
        end = time.perf_counter()
        if end - start < _IDLE_POLL:
            break
        start = end
    return False
