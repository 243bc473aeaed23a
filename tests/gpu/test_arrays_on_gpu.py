"""Every array operation on CuPy arrays: the results of NumPy."""

import functools

import numpy as np
import pytest
from contract import DTYPES, OF_ARRAYS, OPS, Array, agree, call_with, play, steps_of
from mpi4py import MPI

import chainermn

pytestmark = pytest.mark.gpu

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank

FIRST = Array(shape=(4, 6))
#: Each with float32 and another dtype; the first one with all.
ARRAYS = {
    FIRST: None, Array(shape=()): 'int64', Array(shape=(0, 3)): 'complex128',
    Array('fortran', shape=(3, 4)): 'uint16', Array('strided', shape=(3, 4)): 'float16',
    Array('negative strides', shape=(3, 4)): 'int8', Array(shape=(900, 3)): 'float64',
    Array(shape=(1, 2, 1, 2, 2, 1, 3, 1, 1)): 'complex64',
}
OPERATIONS = {
    **{name: functools.partial(call_with, name=name) for name in OF_ARRAYS
       if name != 'multi_node_mean'},
    'isend and irecv': lambda comm, x: isend_and_irecv(comm, x),
    'send and recv': lambda comm, x: send_and_recv(comm, x),
    'send and recv a tuple': lambda comm, x: send_and_recv(comm, (x, x)),
}
MESSAGES = [name for name in OPERATIONS if name not in OF_ARRAYS]


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


@pytest.mark.parametrize('name', OF_ARRAYS)
def test_values(comm, name):
    import cupy

    for n, (x, other) in enumerate(ARRAYS.items()):
        for dtype in DTYPES if other is None else ['float32', other]:
            ops = OPS if x == FIRST else OPS[n % 2:][:1]
            agree([play(comm, calls, cupy)
                   for calls in steps_of(name, SIZE, x._replace(dtype=dtype), ops)])


@pytest.mark.parametrize('operation', MESSAGES)
def test_messages(comm, operation):
    import cupy

    for x, other in ARRAYS.items():
        for dtype in DTYPES if other is None else ['float32', other]:
            given = x._replace(dtype=dtype, seed=RANK)
            check(OPERATIONS[operation](comm, given.make(cupy)),
                  OPERATIONS[operation](comm, given.make()))


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
    """Arrays larger than one MPI message, which the device has only just written."""
    import cupy

    x = cupy.zeros(3_000_000, 'f4')
    for _ in range(20):
        x += RANK + 1
    result = comm.allreduce(x)
    x[...] = 0
    assert (result == 20 * sum(range(1, SIZE + 1))).all()


@pytest.mark.parametrize('operation', OPERATIONS)
def test_on_a_stream_of_the_caller(comm, operation):
    """Results are ready for it, without a wait on the host."""
    import cupy

    x = np.random.RandomState(RANK).randint(0, 3, (4, 6)).astype('f')
    expected = OPERATIONS[operation](comm, x + 1)
    with cupy.cuda.Stream(non_blocking=True):
        check(OPERATIONS[operation](comm, cupy.asarray(x) + 1), expected)


@pytest.mark.parametrize('operation', [
    name for name in OPERATIONS if name in OF_ARRAYS and name != 'scatter'])
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

