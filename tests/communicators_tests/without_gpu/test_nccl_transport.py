"""What pure_nccl gives to NCCL and what to MPI, and that both give what flat gives."""

import numpy as np
import pytest

import chainermn

DTYPES = ['bool', 'int16', 'int64', 'uint8', 'float16', 'float32', 'float64', 'complex64']

# Verb: the call, and what NCCL does for it; with arrays of other lengths, if they may differ.
VERBS = {
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


@pytest.mark.parametrize('op', ['sum', 'prod', 'max', 'min'])
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('verb', VERBS)
def test_as_on_the_host(comm, flat, gpu, verb, dtype, op):
    if dtype == 'complex64' and op in ('max', 'min'):
        return
    call, name = VERBS[verb]
    x = np.random.RandomState(comm.rank).randint(0, 3, (4, 6)).astype(dtype)
    results = arrays(call(comm, gpu.cupy.asarray(x), op))
    for result, expected in zip(results, arrays(call(flat, x, op)), strict=True):
        if expected is None:
            assert result is None
            continue
        assert isinstance(result, gpu.cupy.ndarray)
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result, expected)
    combines = verb not in ('bcast', 'allgather')
    by_mpi = combines and dtype in ('bool', 'int16', 'complex64')
    assert (f'{name} on caller' in gpu.log) == (not by_mpi)


@pytest.mark.parametrize('verb', ['allgather', 'reduce_scatter'])
def test_other_lengths_go_through_mpi(comm, flat, gpu, verb):
    def call(comm, asarray):
        if verb == 'allgather':
            return comm.allgather(asarray(np.arange(comm.rank + 2.)))
        return comm.reduce_scatter([asarray(np.arange(rank + 2.)) for rank in range(comm.size)])

    for result, expected in zip(arrays(call(comm, gpu.cupy.asarray)),
                                arrays(call(flat, np.asarray)), strict=True):
        np.testing.assert_array_equal(result, expected)
    if comm.size > 1:
        assert not any('allGather' in line or 'reduceScatter' in line for line in gpu.log)


@pytest.mark.parametrize('verb', VERBS)
def test_an_array_on_the_host_on_one_rank(comm, gpu, verb):
    """Then all ranks go through MPI."""
    x = np.ones((2, 3))
    on_host = comm.rank == comm.size - 1
    call, name = VERBS[verb]
    for result in arrays(call(comm, x if on_host else gpu.cupy.asarray(x), 'max')):
        if result is not None:
            assert (result == 1).all()
    assert not any(name in line for line in gpu.log)
