"""pure_nccl: which arrays NCCL carries and which MPI, with the results of flat."""

import itertools

import numpy as np
import pytest
from each_case import each_case

import chainermn

DTYPES = ['bool', 'int16', 'int64', 'uint8', 'float16', 'float32', 'float64', 'complex64']

# Operation: the call, and what NCCL does for it; with arrays of other lengths, if they may differ.
OPERATIONS = {
    'bcast': (lambda comm, x, op: comm.bcast(x, comm.size - 1), 'bcast'),
    'allgather': (lambda comm, x, op: comm.allgather(x), 'allGather'),
    'allreduce': (lambda comm, x, op: comm.allreduce(x, op), 'allReduce'),
    'allreduce_many': (lambda comm, x, op: comm.allreduce_many([x, x[:1]], op), 'allReduce'),
    'reduce': (lambda comm, x, op: comm.reduce(x, op, comm.size - 1), 'reduce'),
    'reduce_scatter': (lambda comm, x, op: comm.reduce_scatter([x] * comm.size, op),
                       'reduceScatter'),
}


@pytest.fixture
def comm(gpu):
    comm = chainermn.create_communicator('pure_nccl')
    yield comm
    comm.finalize()


@pytest.fixture(scope='module')
def flat():
    flat = chainermn.create_communicator('flat')
    yield flat
    flat.finalize()


def arrays(result):
    return result if isinstance(result, tuple) else (result,)


@each_case('operation, dtype, op', [
    case for case in itertools.product(OPERATIONS, DTYPES, ['sum', 'prod', 'max', 'min'])
    if case[1:] not in (('complex64', 'max'), ('complex64', 'min'))])
def test_as_on_the_host(comm, flat, gpu, operation, dtype, op):
    gpu.log.clear()
    call, name = OPERATIONS[operation]
    x = np.random.RandomState(comm.rank).randint(0, 3, (4, 6)).astype(dtype)
    results = arrays(call(comm, gpu.cupy.asarray(x), op))
    for result, expected in zip(results, arrays(call(flat, x, op)), strict=True):
        if expected is None:
            assert result is None
            continue
        assert isinstance(result, gpu.cupy.ndarray)
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result, expected)
    combines = operation not in ('bcast', 'allgather')
    by_mpi = combines and dtype in ('bool', 'int16', 'complex64')
    assert (f'{name} on caller' in gpu.log) == (not by_mpi)


MOVES = {
    'gather': lambda comm, make: comm.gather(make(comm.rank, 0), comm.size - 1),
    'scatter': lambda comm, make: comm.scatter(
        [make(0, rank) for rank in range(comm.size)] if comm.rank == comm.size - 1 else None,
        comm.size - 1),
    'alltoall': lambda comm, make: comm.alltoall(
        [make(comm.rank, rank) for rank in range(comm.size)]),
}
SHAPES = {
    'homogeneous': lambda n: (4, 6),
    'different': lambda n: (n, 3),  # of no elements for some
    '0-d': lambda n: (),
    '9-d': lambda n: (1, 2, 1, 1, 2, 1, 1, 1, n + 1),
}


@each_case('operation, shape, dtype, late', itertools.product(
    MOVES, SHAPES, DTYPES, [False, True]))
def test_transfers_as_on_the_host(comm, flat, gpu, operation, shape, dtype, late):
    """On whichever stream is current."""
    gpu.log.clear()

    def make(asarray):
        def make(source, dest):
            x = np.empty(SHAPES[shape](source + dest), dtype)
            x[...] = np.random.RandomState(10 * source + dest).randint(0, 3, x.shape)
            return asarray(x.T if x.ndim < 3 else x)
        return make

    expected = arrays(MOVES[operation](flat, make(np.asarray)))
    gpu.late = late
    stream = gpu.cupy.cuda.Stream(non_blocking=True)
    stream.wait_event(gpu.streams[-1].record(gpu.cupy.cuda.Event(True)))
    with stream:
        results = arrays(MOVES[operation](comm, make(gpu.cupy.asarray)))
    gpu.streams[-1].wait_event(stream.record(gpu.cupy.cuda.Event(True)))
    for result, y in zip(results, expected, strict=True):
        if y is None:
            assert result is None
            continue
        assert isinstance(result, gpu.cupy.ndarray)
        assert (result.dtype, result.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(result, y)
    if comm.size > 1 and shape != 'different':
        assert 'exchange on own' in gpu.log
    gpu.late = False


@pytest.mark.parametrize('operation', ['gather', 'alltoall'])
def test_transfer_with_host_array_on_one_rank(comm, gpu, operation):
    """Then all ranks use MPI."""
    asarray = np.asarray if comm.rank == comm.size - 1 else gpu.cupy.asarray
    for x in arrays(MOVES[operation](comm, lambda *_: asarray(np.ones((2, 3))))):
        assert x is None or (np.array(x) == 1).all()
    assert not any('exchange' in line for line in gpu.log)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('operation', ['scatter', 'alltoall', 'reduce_scatter'])
def test_arrays_in_different_places(comm, gpu, same_error, operation):
    xs = [np.ones(3), *[gpu.cupy.asarray(np.ones(3)) for _ in range(comm.size - 1)]]
    error = same_error(getattr(comm, operation), xs, failed=0 if operation == 'scatter' else None)
    assert isinstance(error, TypeError)
    assert 'all on the host or all on a device' in str(error)


@pytest.mark.parametrize('operation', ['allgather', 'reduce_scatter'])
def test_other_lengths_go_through_mpi(comm, flat, gpu, operation):
    def call(comm, asarray):
        if operation == 'allgather':
            return comm.allgather(asarray(np.arange(comm.rank + 2.)))
        return comm.reduce_scatter([asarray(np.arange(rank + 2.)) for rank in range(comm.size)])

    for result, expected in zip(arrays(call(comm, gpu.cupy.asarray)),
                                arrays(call(flat, np.asarray)), strict=True):
        np.testing.assert_array_equal(result, expected)
    if comm.size > 1:
        assert not any('allGather' in line or 'reduceScatter' in line for line in gpu.log)


@pytest.mark.parametrize('operation', OPERATIONS)
def test_reduction_with_host_array_on_one_rank(comm, gpu, operation):
    """Then all ranks use MPI."""
    x = np.ones((2, 3))
    on_host = comm.rank == comm.size - 1
    call, name = OPERATIONS[operation]
    for result in arrays(call(comm, x if on_host else gpu.cupy.asarray(x), 'max')):
        if result is not None:
            assert (result == 1).all()
    assert not any(name in line for line in gpu.log)
