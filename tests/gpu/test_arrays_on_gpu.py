"""Every array operation on CuPy arrays, against the same operation on NumPy arrays."""

import numpy as np
import pytest
from mpi4py import MPI

import chainermn

pytestmark = pytest.mark.gpu

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank

DTYPES = ['bool', 'int8', 'int32', 'int64', 'uint8', 'uint16', 'float16', 'float32', 'float64',
          'complex64', 'complex128']
LAYOUTS = {
    '0-d': lambda x: x[0, 0].reshape(()),
    'empty': lambda x: x[:0],
    '2-d': lambda x: x,
    'transposed': lambda x: x.T,
    'strided': lambda x: x[::2, 1:],
    '9-d': lambda x: x.reshape(1, 2, 1, 2, 2, 1, 3, 1, 1),
}
OPERATIONS = {
    'bcast': lambda comm, x: comm.bcast(x, SIZE - 1),
    'gather': lambda comm, x: comm.gather(x, SIZE - 1),
    'allgather': lambda comm, x: comm.allgather(x),
    'allreduce': lambda comm, x: comm.allreduce(x),
    'allreduce_many': lambda comm, x: comm.allreduce_many([x, x]),
    'reduce': lambda comm, x: comm.reduce(x, root=SIZE - 1),
    'reduce_scatter': lambda comm, x: comm.reduce_scatter([x] * SIZE),
    'isend and irecv': lambda comm, x: isend_and_irecv(comm, x),
    'alltoall': lambda comm, x: comm.alltoall([x] * SIZE),
    'scatter': lambda comm, x: comm.scatter([x] * SIZE, SIZE - 1),
    'send and recv': lambda comm, x: send_and_recv(comm, x),
    'send and recv a tuple': lambda comm, x: send_and_recv(comm, (x, x)),
}


def send_and_recv(comm, data):
    """Send to the next rank; return what the one before sent."""
    if SIZE == 1:
        pytest.skip('needs two ranks')
    if RANK % 2 == 0:
        comm.send(data, (RANK + 1) % SIZE, 3)
        return comm.recv((RANK - 1) % SIZE, 3)
    received = comm.recv((RANK - 1) % SIZE, 3)
    comm.send(data, (RANK + 1) % SIZE, 3)
    return received


def isend_and_irecv(comm, x):
    sent = comm.isend(x, (RANK + 1) % SIZE, 3)
    received = comm.irecv((RANK - 1) % SIZE, 3).wait()
    sent.wait()
    return received


@pytest.fixture(scope='module', params=['flat', 'pure_nccl'])
def comm(request):
    comm = chainermn.create_communicator(request.param)
    yield comm
    comm.finalize()


def check(result, expected, tolerance=0):
    import cupy

    if expected is None or isinstance(expected, tuple):
        assert type(result) is type(expected)
        for x, y in zip(result or (), expected or (), strict=True):
            check(x, y)
        return
    assert type(result) is cupy.ndarray
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    np.testing.assert_allclose(result.get(), expected, tolerance, tolerance)


@pytest.mark.sample(101)
@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('operation', OPERATIONS)
def test_as_on_the_host(comm, operation, dtype, layout):
    import cupy

    x = np.random.RandomState(RANK).randint(0, 2, (4, 6)).astype(dtype)
    expected = OPERATIONS[operation](comm, LAYOUTS[layout](x))
    check(OPERATIONS[operation](comm, LAYOUTS[layout](cupy.asarray(x))), expected)


@pytest.mark.parametrize('op', ['sum', 'prod', 'max', 'min'])
@pytest.mark.parametrize('dtype', ['bool', 'int32', 'float16', 'float32', 'float64'])
def test_operations(comm, dtype, op):
    import cupy

    x = np.random.RandomState(RANK).randint(0, 3, (4, 6)).astype(dtype)
    check(comm.allreduce(cupy.asarray(x), op), comm.allreduce(x, op))


@pytest.mark.parametrize('dtype', ['float16', 'float32', 'float64'])
@pytest.mark.parametrize('name', ['pure_nccl', 'non_cuda_aware', 'flat', 'naive'])
def test_multi_node_mean(name, dtype):
    """The order of the sum may differ: small arrays on the host are sent with the call's check."""
    import cupy

    comm = chainermn.create_communicator(name)
    x = np.random.RandomState(RANK).standard_normal((4, 6)).astype(dtype)
    check(comm.multi_node_mean(cupy.asarray(x)), comm.multi_node_mean(x),
          tolerance=SIZE * np.finfo(dtype).eps)
    comm.finalize()


def test_large(comm):
    """Larger than what MPI sends at once, and written on the device just before."""
    import cupy

    x = cupy.zeros(3_000_000, 'f4')
    for _ in range(20):
        x += RANK + 1
    result = comm.allreduce(x)
    x[...] = 0
    assert (result == 20 * sum(range(1, SIZE + 1))).all()


def test_dtypes_that_differ(comm, same_error):
    import cupy

    if SIZE == 1:
        pytest.skip('needs two ranks')
    error = same_error(comm.allreduce, cupy.zeros(3, 'f2' if RANK == 1 else 'f4'))
    assert 'float16 (3,)' in str(error)


@pytest.mark.parametrize('rows', [lambda n: n, lambda n: 100 * n], ids=['few', 'many'])
def test_shapes_that_differ(comm, rows):
    """Some arrays are empty."""
    import cupy

    def numbered(source, dest):
        return np.full((rows(source + dest), 3), 10 * source + dest, 'f')

    xs = comm.allgather(cupy.asarray(numbered(RANK, 0)))
    check(xs, tuple(numbered(rank, 0) for rank in range(SIZE)))
    xs = comm.gather(cupy.asarray(numbered(RANK, 0)), SIZE - 1)
    check(xs, tuple(numbered(rank, 0) for rank in range(SIZE)) if RANK == SIZE - 1 else None)
    xs = comm.alltoall([cupy.asarray(numbered(RANK, rank)) for rank in range(SIZE)])
    check(xs, tuple(numbered(rank, RANK) for rank in range(SIZE)))
    xs = [cupy.asarray(numbered(0, rank)) for rank in range(SIZE)] if RANK == SIZE - 1 else None
    check(comm.scatter(xs, SIZE - 1), numbered(0, RANK))


@pytest.mark.parametrize('operation', OPERATIONS)
def test_on_a_stream_of_the_caller(comm, operation):
    """Results are ready for it, without a wait on the host."""
    import cupy

    x = np.random.RandomState(RANK).randint(0, 3, (4, 6)).astype('f')
    expected = OPERATIONS[operation](comm, x + 1)
    with cupy.cuda.Stream(non_blocking=True):
        check(OPERATIONS[operation](comm, cupy.asarray(x) + 1), expected)


@pytest.mark.parametrize('operation', [
    'bcast', 'gather', 'allgather', 'allreduce', 'allreduce_many', 'reduce', 'reduce_scatter',
    'alltoall'])
def test_an_array_on_the_host_of_one_rank(comm, operation):
    """Each rank gets the numbers, by MPI."""
    import cupy

    x = np.random.RandomState(RANK).randint(0, 3, (4, 6)).astype('f')
    found = OPERATIONS[operation](comm, x if RANK == SIZE - 1 else cupy.asarray(x))
    expected = OPERATIONS[operation](comm, x)
    for y, z in zip(*(each if isinstance(each, tuple) else (each,) for each in (found, expected)),
                    strict=True):
        assert (y is None) == (z is None)
        if z is not None:
            np.testing.assert_array_equal(cupy.asnumpy(y), z)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('operation', ['scatter', 'alltoall', 'reduce_scatter'])
def test_arrays_in_different_places(comm, same_error, operation):
    import cupy

    xs = [np.ones(3), *[cupy.ones(3) for _ in range(SIZE - 1)]]
    error = same_error(getattr(comm, operation), xs)
    assert isinstance(error, TypeError)
    assert 'all be on the host, or all on a device' in str(error)


def test_reduce_scatter_of_other_lengths(comm):
    import cupy

    xs = [np.arange(rank + 2.) for rank in range(SIZE)]
    check(comm.reduce_scatter([cupy.asarray(x) for x in xs]), SIZE * xs[RANK])
