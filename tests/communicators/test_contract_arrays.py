"""Array operations: every communicator, dtype and layout gives the result of NumPy."""

import functools

import numpy as np
import pytest
from each_case import each_case
from shared_fixtures import dtypes_and_kinds, make_array

pytestmark = pytest.mark.every_size

OPS = {'sum': np.add, 'prod': np.multiply, 'max': np.maximum, 'min': np.minimum}


def each_array(test):
    """Run a test for each dtype and kind; ``given`` makes arrays, which must not change."""
    @each_case('dtype, kind', dtypes_and_kinds)
    def run(comms, check, dtype, kind):
        made = []

        def given(seed, rows=0):
            x = make_array(dtype, kind, seed, rows)
            made.append((x, np.array(x)))
            return x

        test(comms, given, check)
        for x, copy in made:
            np.testing.assert_array_equal(x, copy)
    return run


@each_array
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


@each_array
def test_bcast(comms, given, check):
    for comm in comms:
        root = comm.size - 1
        x = given(comm.rank, rows=comm.rank)
        result = comm.bcast(x, root)
        if comm.rank == root:
            assert result is x
        else:
            check(result, given(root, rows=root), x)


@each_array
def test_gather(comms, given, check):
    for comm in comms:
        root = comm.size - 1
        x = given(comm.rank, rows=comm.rank)
        results = comm.gather(x, root)
        if comm.rank == root:
            assert type(results) is tuple
            for rank, result in enumerate(results):
                check(result, given(rank, rows=rank), x, *results[:rank])
            assert len(results) == comm.size
        else:
            assert results is None


@each_array
def test_allgather(comms, given, check):
    for comm in comms:
        x = given(comm.rank, rows=comm.rank)
        results = comm.allgather(x)
        assert type(results) is tuple
        for rank, result in enumerate(results):
            check(result, given(rank, rows=rank), x, *results[:rank])
        assert len(results) == comm.size


def expected_of(op, xs):
    return np.asarray(functools.reduce(OPS[op], xs), xs[0].dtype)


def ops_of(dtype):
    return ['sum', 'prod'] if dtype.kind == 'c' else list(OPS)


@each_array
def test_allreduce(comms, given, check):
    for comm in comms:
        x = given(comm.rank)
        xs = [given(rank) for rank in range(comm.size)]
        dtype = xs[0].dtype.newbyteorder('=')
        for op in ops_of(dtype):
            expected = expected_of(op, xs)
            check(comm.allreduce(x, op), expected, x)
            for out in np.empty(x.shape, dtype), np.empty((*x.shape, 2), dtype)[..., 0]:
                assert comm.allreduce(x, op, out=out) is out
                check(out, expected, x)
        check(comm.allreduce(x), expected_of('sum', xs), x)


@each_case('dtype, kind', dtypes_and_kinds)
def test_allreduce_in_place(comms, check, dtype, kind):
    for comm in comms:
        xs = [make_array(dtype, kind, rank) for rank in range(comm.size)]
        for op in ops_of(xs[0].dtype):
            for copy in (np.array, lambda x: np.array(x, order='F'),
                         lambda x: np.stack([x, x], -1)[..., 0]):
                mine = copy(xs[comm.rank].astype(xs[0].dtype.newbyteorder('=')))
                assert comm.allreduce(mine, op, out=mine) is mine
                check(mine, expected_of(op, xs))


@each_array
def test_allreduce_many(comms, given, check):
    """Arrays of every dtype in one call: this one's and fixed ones, twice each."""
    for comm in comms:
        others = [np.full(3, comm.rank + 1, dtype) for dtype in ('f4', 'f2', 'i8', '?')]
        xs = [given(comm.rank), *others, given(comm.rank + 1, rows=2)]
        for op in ops_of(xs[0].dtype):
            results = comm.allreduce_many(xs, op)
            assert type(results) is tuple
            assert len(results) == len(xs)
            check(results[0], expected_of(op, [given(r) for r in range(comm.size)]), *xs)
            check(results[-1], expected_of(op, [given(r + 1, rows=2) for r in range(comm.size)]),
                  results[0], *xs)
            for result, x in zip(results[1:5], others, strict=True):
                check(result, expected_of(op, [
                    np.full(3, r + 1, x.dtype) for r in range(comm.size)]), x)
        assert comm.allreduce_many([]) == ()


@each_array
def test_reduce(comms, given, check):
    for comm in comms:
        root = comm.size - 1
        x = given(comm.rank)
        xs = [given(rank) for rank in range(comm.size)]
        for op in ops_of(xs[0].dtype):
            result = comm.reduce(x, op, root)
            if comm.rank == root:
                check(result, expected_of(op, xs), x)
            else:
                assert result is None


@each_array
def test_reduce_scatter(comms, given, check):
    for comm in comms:
        def of(rank):
            return [given(3 * rank + dest, rows=dest) for dest in range(comm.size)]  # noqa: B023

        mine = of(comm.rank)
        for op in ops_of(mine[0].dtype):
            result = comm.reduce_scatter(mine, op)
            check(result, expected_of(op, [of(rank)[comm.rank] for rank in range(comm.size)]),
                  *mine)


@each_array
def test_reduce_scatter_rows(comms, given, check):
    for comm in comms:
        rows = np.moveaxis(np.stack([given(comm.rank)] * comm.size, axis=-1), -1, 0)
        check(comm.reduce_scatter(rows),
              expected_of('sum', [given(rank) for rank in range(comm.size)]), rows)


@each_array
def test_isend_irecv(comms, given, check):
    """To all ranks at once, including itself; tags are not confused."""
    for comm in comms:
        sent = [comm.isend(given(comm.rank), rank, 3) for rank in range(comm.size)]
        sent += [comm.isend((given(1), given(2, rows=2)), rank, 3) for rank in range(comm.size)]
        firsts = [comm.irecv(rank, 3) for rank in range(comm.size)]
        seconds = [comm.irecv(rank, 3) for rank in range(comm.size)]
        for pair in reversed([request.wait() for request in reversed(seconds)]):
            assert type(pair) is tuple
            check(pair[0], given(1), pair[1])
            check(pair[1], given(2, rows=2))
            assert len(pair) == 2
        for rank, result in enumerate(comm.waitall(firsts)):
            check(result, given(rank))
        assert comm.waitall(sent) == [None] * len(sent)


@each_array
def test_alltoall(comms, given, check):
    for comm in comms:
        xs = tuple(given(3 * comm.rank + dest, rows=dest) for dest in range(comm.size))
        results = comm.alltoall(xs)
        assert type(results) is tuple
        for source, result in enumerate(results):
            check(result, given(3 * source + comm.rank, rows=comm.rank), *xs, *results[:source])
        assert len(results) == comm.size


@each_array
def test_scatter(comms, given, check):
    for comm in comms:
        root = comm.size - 1
        xs = tuple(given(rank, rows=rank) for rank in range(comm.size))
        result = comm.scatter(xs if comm.rank == root else None, root)
        check(result, xs[comm.rank], *xs)


@each_array
def test_scatter_rows(comms, given, check):
    for comm in comms:
        root = comm.size - 1
        rows = np.stack([given(rank) for rank in range(comm.size)], axis=-1)
        rows = np.moveaxis(rows, -1, 0)  # not contiguous
        result = comm.scatter(rows if comm.rank == root else None, root)
        check(result, given(comm.rank), rows)


@each_array
def test_multi_node_mean(comms, given, check):
    for comm in comms:
        x = given(0)
        if x.dtype.kind != 'f':
            with pytest.raises(TypeError, match='floating-point'):
                comm.multi_node_mean(x)
        else:
            # Around the mean on rank 0, by integers that add up to 0 over the ranks.
            mine = np.asarray(x + x.dtype.type(2 * comm.rank - comm.size + 1), x.dtype)
            check(comm.multi_node_mean(mine), x, mine)


def test_the_mean_of_version_7(comms):
    """Copies of its batch normalization call a private method."""
    for comm in comms:
        own = np.array([comm.rank, 2 * comm.rank], np.float32)
        mean, received = [(comm.size - 1) / 2, comm.size - 1], np.zeros(2, np.float32)
        comm._multi_node_mean(own, received)
        np.testing.assert_array_equal(own, [comm.rank, 2 * comm.rank])
        comm._multi_node_mean(None, own)
        for x in (received, own):
            np.testing.assert_allclose(x, mean, rtol=1e-6)
