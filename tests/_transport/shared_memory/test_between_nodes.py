"""Exchanges between nodes wait, and send no unnecessary data; here, each rank is a node.

test_shared_sums.py compares their results.
"""

import time

import numpy as np
import pytest
from mpi4py import MPI

from chainermn._transport.shared_memory.between_nodes import (
    NodeGather,
    NodeReduction,
    NodeSum,
    Waiting,
    split,
)

pytestmark = [pytest.mark.every_size, pytest.mark.mpi(min_size=2)]

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def node_sum(inter, data, waiting=None):
    received = np.full(data.size + SIZE, np.nan, data.dtype)
    return NodeSum(inter, data, received, waiting or Waiting())


def run(exchange, scale=None):
    exchange.start(scale)
    exchange.combine(scale)
    exchange.finish()


@pytest.mark.parametrize('is_passive', [False, True])
def test_a_late_node_is_awaited(inter, is_passive):
    waiting = Waiting()
    waiting.is_passive = is_passive
    data = np.full(100_000, RANK, np.float32)
    if RANK == 1:
        time.sleep(.05)
    run(node_sum(inter, data, waiting))
    assert set(data) == {sum(range(SIZE))}


def test_each_node_sends_the_minimum_of_bytes(counting):
    data = np.ones(1200, np.float32)
    run(node_sum(counting, data))
    assert counting.sent == 2 * (SIZE - 1) * data.nbytes // SIZE


def test_half_of_these_bytes_sum_for_owners_and_half_copy(counting):
    data = np.full(1200, RANK, np.float32)
    parts, _ = split(counting, data)
    run(NodeReduction(counting, parts, np.empty_like(data), Waiting()), np.float32(2))
    assert counting.sent == (SIZE - 1) * data.nbytes // SIZE
    assert set(parts[RANK]) == {2 * sum(range(SIZE))}
    for node, part in enumerate(parts):
        part[...] = node if node == RANK else -1
    run(NodeGather(counting, parts, Waiting()))
    assert counting.sent == 2 * (SIZE - 1) * data.nbytes // SIZE
    np.testing.assert_array_equal(data, np.repeat(range(SIZE), 1200 // SIZE))
