"""The verbs on arrays: every communicator, verb, dtype and kind of array gives what NumPy gives."""

import functools

import numpy as np
import pytest

OPS = {'sum': np.add, 'prod': np.multiply, 'max': np.maximum, 'min': np.minimum}


@pytest.fixture
def given(make):
    """Makes the array of each rank, and checks at the end that the verbs did not change it."""
    made = []

    def given(seed, rows=0):
        x = make(seed, rows)
        made.append((x, np.array(x)))
        return x
    yield given
    for x, copy in made:
        np.testing.assert_array_equal(x, copy)


def test_send_recv(comms, given, check):
    for comm in comms:
        if comm.size == 1:
            with pytest.raises(ValueError, match='this rank itself'):
                comm.send(given(0), 0, 0)
        elif comm.rank == 0:
            comm.send(given(0), comm.size - 1, 3)
            comm.send((given(1), given(2, rows=2)), comm.size - 1, 5)
        elif comm.rank == comm.size - 1:
            check(comm.recv(0, 3), given(0))
            received = comm.recv(0, 5)
            assert type(received) is tuple
            check(received[0], given(1), received[1])
            check(received[1], given(2, rows=2))
            assert len(received) == 2


def test_bcast(comms, given, check):
    for comm in comms:
        root = comm.size - 1
        x = given(comm.rank, rows=comm.rank)
        result = comm.bcast(x, root)
        if comm.rank == root:
            assert result is x
        else:
            check(result, given(root, rows=root), x)


def test_gather(comms, given, check):
    for comm in comms:
        root = comm.size - 1
        x = given(comm.rank, rows=comm.rank)
        results = comm.gather(x, root)
        if comm.rank == root:
            assert type(results) is tuple
            for rank, result in enumerate(results):
                check(result, given(rank, rows=rank), x)
            assert len(results) == comm.size
        else:
            assert results is None


def test_allgather(comms, given, check):
    for comm in comms:
        x = given(comm.rank, rows=comm.rank)
        results = comm.allgather(x)
        assert type(results) is tuple
        for rank, result in enumerate(results):
            check(result, given(rank, rows=rank), x)
        assert len(results) == comm.size


def test_allreduce(comms, given, check):
    for comm in comms:
        x = given(comm.rank)
        xs = [given(rank) for rank in range(comm.size)]
        for op, combine in OPS.items():
            if x.dtype.kind == 'c' and op in ('max', 'min'):
                with pytest.raises(TypeError, match='no order'):
                    comm.allreduce(x, op)
            else:
                expected = functools.reduce(combine, xs)
                check(comm.allreduce(x, op), np.asarray(expected, x.dtype), x)
        check(comm.allreduce(x), comm.allreduce(x, 'sum'), x)


def test_alltoall(comms, given, check):
    for comm in comms:
        xs = tuple(given(3 * comm.rank + dest, rows=dest) for dest in range(comm.size))
        results = comm.alltoall(xs)
        assert type(results) is tuple
        for source, result in enumerate(results):
            check(result, given(3 * source + comm.rank, rows=comm.rank), *xs)
        assert len(results) == comm.size


def test_scatter(comms, given, check):
    for comm in comms:
        root = comm.size - 1
        xs = tuple(given(rank, rows=rank) for rank in range(comm.size))
        result = comm.scatter(xs if comm.rank == root else None, root)
        check(result, xs[comm.rank], *xs)


def test_scatter_rows(comms, given, check):
    for comm in comms:
        root = comm.size - 1
        rows = np.stack([given(rank) for rank in range(comm.size)], axis=-1)
        rows = np.moveaxis(rows, -1, 0)  # not contiguous
        result = comm.scatter(rows if comm.rank == root else None, root)
        check(result, given(comm.rank), rows)


def test_multi_node_mean(comms, given, check):
    for comm in comms:
        x = given(0)
        if x.dtype.kind != 'f':
            with pytest.raises(TypeError, match='floating-point'):
                comm.multi_node_mean(x)
        else:
            # Around the mean on rank 0, by whole numbers that add up to 0 over the ranks.
            mine = np.asarray(x + x.dtype.type(2 * comm.rank - comm.size + 1), x.dtype)
            check(comm.multi_node_mean(mine), x, mine)
