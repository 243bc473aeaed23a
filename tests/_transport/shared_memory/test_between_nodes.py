"""Exchanges between nodes; here, each rank is a node."""

import time

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from mpi4py import MPI

from chainermn._transport.shared_memory.between_nodes import (
    NodeCopy,
    NodeGather,
    NodeReduction,
    NodeSum,
    Waiting,
    split,
)

pytestmark = pytest.mark.every_size

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LENGTHS = st.lists(st.one_of(st.integers(1, 9), st.integers(1000, 20000)), min_size=1, max_size=5)


def node_sum(inter, data, waiting=None):
    received = np.full(data.size + SIZE, np.nan, data.dtype)
    return NodeSum(inter, data, received, waiting or Waiting())


def run(exchanges, scale=None, in_flight=2):
    """Run the phases of all transfers, ``in_flight`` steps apart."""
    for k in range(len(exchanges) + 2 * in_flight):
        if k >= 2 * in_flight:
            exchanges[k - 2 * in_flight].finish()
        if in_flight <= k < len(exchanges) + in_flight:
            exchanges[k - in_flight].combine(scale)
        if k < len(exchanges):
            exchanges[k].start(scale)


def slices(rank, lengths, dtype):
    return [np.random.RandomState(10 * rank + n).normal(0, 10, length).astype(dtype)
            for n, length in enumerate(lengths)]


@pytest.mark.mpi(min_size=2)
@hypothesis.settings(max_examples=40)
@hypothesis.given(lengths=LENGTHS, dtype=st.sampled_from(['float32', 'float64']),
                  scale=st.sampled_from([None, 1 / 3]), in_flight=st.integers(1, 3))
def test_sum_equals_a_sum_in_the_order_of_the_nodes(inter, lengths, dtype, scale, in_flight):
    scale = None if scale is None else np.dtype(dtype).type(scale)
    expected = slices(0, lengths, dtype)
    for rank in range(1, SIZE):
        for total, term in zip(expected, slices(rank, lengths, dtype), strict=True):
            total += term
    if scale is not None:
        expected = [total * scale for total in expected]
    own = slices(RANK, lengths, dtype)
    waiting = Waiting()
    run([node_sum(inter, data, waiting) for data in own], scale, in_flight)
    for data, total in zip(own, expected, strict=True):
        assert data.tobytes() == total.tobytes()


@pytest.mark.mpi(min_size=2)
def test_infinities_and_nans(inter):
    data = np.array([np.inf, np.nan, -np.inf if RANK else np.inf, 1], np.float32)
    with np.errstate(all='ignore'):
        run([node_sum(inter, data)])
    np.testing.assert_array_equal(data, [np.inf, np.nan, np.nan, SIZE])


@hypothesis.settings(max_examples=20)
@hypothesis.given(lengths=LENGTHS)
def test_copy_takes_the_data_of_the_root(inter, lengths):
    for root in range(SIZE):
        own = slices(RANK, lengths, np.float32)
        waiting = Waiting()
        run([NodeCopy(inter, data, waiting, root) for data in own])
        for data, expected in zip(own, slices(root, lengths, np.float32), strict=True):
            np.testing.assert_array_equal(data, expected)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('is_passive', [False, True])
def test_a_late_node_is_awaited(inter, is_passive):
    waiting = Waiting()
    waiting.is_passive = is_passive
    data = np.full(100_000, RANK, np.float32)
    if RANK == 1:
        time.sleep(.05)
    run([node_sum(inter, data, waiting)])
    assert set(data) == {sum(range(SIZE))}


@pytest.mark.mpi(min_size=2)
def test_each_node_sends_the_minimum_of_bytes(counting):
    data = np.ones(1200, np.float32)
    run([node_sum(counting, data)])
    assert counting.sent == 2 * (SIZE - 1) * data.nbytes // SIZE


@pytest.mark.mpi(min_size=2)
def test_half_of_these_bytes_sum_for_owners_and_half_copy(counting):
    data = np.full(1200, RANK, np.float32)
    parts, _ = split(counting, data)
    run([NodeReduction(counting, parts, np.empty_like(data), Waiting())], np.float32(2))
    assert counting.sent == (SIZE - 1) * data.nbytes // SIZE
    assert set(parts[RANK]) == {2 * sum(range(SIZE))}
    for node, part in enumerate(parts):
        part[...] = node if node == RANK else -1
    run([NodeGather(counting, parts, Waiting())])
    assert counting.sent == 2 * (SIZE - 1) * data.nbytes // SIZE
    np.testing.assert_array_equal(data, np.repeat(range(SIZE), 1200 // SIZE))


@pytest.mark.mpi(min_size=2)
def test_nodes_with_nothing_to_send_or_to_receive(inter):
    data = np.full(9, RANK, np.float32)
    parts = [data[:5], *[data[5:5]] * (SIZE - 2), data[5:]]
    run([NodeReduction(inter, parts, np.empty(5 * SIZE, 'f'), Waiting())])
    assert set(parts[RANK]) <= {sum(range(SIZE))}
    data[...] = RANK
    run([NodeGather(inter, parts, Waiting())])
    assert data.tolist() == [0] * 5 + [SIZE - 1] * 4
