"""chainermn.functions and MultiNodeChainList on GPU arrays: the same values as on host arrays."""

import chainer
import chainer.functions as F
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
import chainermn.functions as mnf

pytestmark = pytest.mark.gpu

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
TOLERANCE = {'float16': 2e-2, 'float32': 1e-5}

FUNCTIONS = {
    'allgather': lambda comm, xs: mnf.allgather(comm, xs[0]),
    'allreduce': lambda comm, xs: mnf.allreduce(comm, xs[0]),
    'alltoall': lambda comm, xs: mnf.alltoall(comm, xs),
    'reduce_scatter': lambda comm, xs: mnf.reduce_scatter(comm, xs),
    'bcast': lambda comm, xs: mnf.bcast(comm, xs[0], SIZE - 1),
    'gather': lambda comm, xs: mnf.gather(comm, xs[0], SIZE - 1),
    'scatter': lambda comm, xs: mnf.scatter(comm, xs, SIZE - 1),
    'send and recv': lambda comm, xs: ring(comm, xs[0]),
}


def ring(comm, x):
    """Send to the next rank; return the array of the rank before."""
    if SIZE == 1:
        pytest.skip('needs two ranks')
    if RANK == 0:
        sent = mnf.send(F.tanh(x), comm, 1)
        return mnf.recv(comm, SIZE - 1, delegate_variable=sent)
    y = mnf.recv(comm, RANK - 1)
    sent = mnf.send(F.tanh(x), comm, (RANK + 1) % SIZE)
    return mnf.pseudo_connect(sent, y)


@pytest.fixture
def comm(name):
    comm = chainermn.create_communicator(name)
    yield comm
    comm.finalize()


def values_and_gradients(comm, function, xs):
    xs = [chainer.Variable(x) for x in xs]
    ys = FUNCTIONS[function](comm, xs)
    ys = list(ys) if isinstance(ys, tuple) else [ys]
    if ys[0].size:
        loss = sum(F.sum(y * y) * (1 + RANK + 10 * i) for i, y in enumerate(ys))
    else:
        loss, = ys  # of a rank without a result
    loss.backward()
    return [*(y.array for y in ys), *(x.grad for x in xs)]


@pytest.mark.parametrize('dtype', TOLERANCE)
@pytest.mark.parametrize('function', FUNCTIONS)
def test_as_on_the_host(comm, name, function, dtype):
    import cupy

    host = chainermn.create_communicator('naive')
    random = np.random.RandomState(RANK)
    xs = [random.uniform(-1, 1, (2, 3)).astype(dtype) for _ in range(SIZE)]
    expected = values_and_gradients(host, function, xs)
    found = values_and_gradients(comm, function, [cupy.asarray(x) for x in xs])
    for y, z in zip(found, expected, strict=True):
        assert (y is None) == (z is None)
        if z is not None and z.size:
            assert type(y) is cupy.ndarray and y.dtype == dtype
            np.testing.assert_allclose(y.get(), z, TOLERANCE[dtype], TOLERANCE[dtype])
    host.finalize()

