"""Means of lists of arrays in the background."""

import time

import numpy as np
import pytest
from each_case import each_case

import chainermn
from chainermn.communicators import compression


@pytest.fixture(params=['naive', 'flat'])
def comm(request):
    comm = chainermn.create_communicator(request.param)
    yield comm
    comm.finalize()


def arrays_of(rank, number, dtype=np.float32, sizes=(3, 40000, 1)):
    return {f'{number}/{i}': (np.arange(size) % 7 + rank + number).astype(dtype)
            for i, size in enumerate(sizes)}


def mean_of(comm, number, **kwds):
    ranks = [arrays_of(rank, number, **kwds) for rank in range(comm.size)]
    return [sum(arrays[path].astype('d') for arrays in ranks) / comm.size for path in ranks[0]]


def test_several_dtypes_and_shapes_and_a_repeated_array(comm):
    queue = comm.mean_queue()
    x = np.full((2, 3), comm.rank, np.float32)
    means = queue.submit({'a': x, 'b': x, 'c': np.float64([comm.rank]), 'd': x.T,
                       'e': np.empty((0, 2), np.float16), 'f': np.array(comm.rank, np.float32)})
    queue.wait()
    for mean, shape in zip(means, [(2, 3), (2, 3), (1,), (3, 2), (0, 2), ()], strict=True):
        assert mean.shape == shape
        assert (mean == (comm.size - 1) / 2).all()


def test_caller_continues(comm):
    """Ranks submit at any time, and use the communicator meanwhile."""
    queue = comm.mean_queue()
    results = []
    for n in range(4):
        if n % comm.size == comm.rank:
            time.sleep(0.02)
        results.append(queue.submit(arrays_of(comm.rank, n)))
        assert comm.allreduce(np.float32([n])) == n * comm.size
        assert comm.bcast_obj(comm.rank, root=comm.size - 1) == comm.size - 1
    queue.wait()
    np.testing.assert_allclose(results[3][1], mean_of(comm, 3)[1], rtol=1e-6)


def test_memory_is_reused(comm):
    queue = comm.mean_queue()
    places = set()
    for n in range(4):
        means = queue.submit({'x': np.full(50000, n, np.float32)})
        queue.wait()
        places.add(means[0].ctypes.data)
        del means
    assert len(places) == 1


def test_background_error_is_raised_by_wait(comm):
    class Fails:
        def compress(self, x, name):
            raise ZeroDivisionError('compressed')

        def decompress(self, encoded, size, dtype):
            return encoded

    queue = comm.mean_queue()
    queue.submit(arrays_of(comm.rank, 0), Fails() if comm.rank == 0 else compression.get('fp16'))
    with pytest.raises(ZeroDivisionError, match='compressed'):
        queue.wait()
    means = queue.submit(arrays_of(comm.rank, 1))
    queue.wait()
    np.testing.assert_allclose(means[1], mean_of(comm, 1)[1], rtol=1e-6)


@each_case('n_submitted', [lambda rank: rank, lambda rank: 3 - min(rank, 3), lambda rank: 2])
def test_cancel(comm, n_submitted):
    queue = comm.mean_queue()
    for _ in range(2):
        for n in range(n_submitted(comm.rank)):
            queue.submit(arrays_of(comm.rank, n))
        queue.cancel()
        means = queue.submit(arrays_of(comm.rank, 9))
        queue.wait()
        np.testing.assert_allclose(means[1], mean_of(comm, 9)[1], rtol=1e-6)


@pytest.mark.mpi(min_size=2)
@each_case('other', [
    {'a': np.zeros(5, 'f'), 'b': np.zeros(3, 'f')}, {'a': np.zeros(3, 'd'), 'b': np.zeros(5, 'd')},
    {'c': np.zeros(3, 'f'), 'b': np.zeros(5, 'f')}, {'b': np.zeros(5, 'f'), 'a': np.zeros(3, 'f')},
    {'a': np.zeros(3, 'f')}])
def test_mismatched_arrays(comm, other):
    """They are not averaged, but later submissions are."""
    queue = comm.mean_queue()
    assert not queue.pending
    queue.submit(other if comm.rank == 1 else {'a': np.zeros(3, 'f'), 'b': np.zeros(5, 'f')})
    means = queue.submit(arrays_of(comm.rank, 1))
    assert queue.pending
    with pytest.raises(ValueError, match='ranks submitted gradients with different paths'):
        queue.wait()
    assert not queue.pending
    np.testing.assert_allclose(means[1], mean_of(comm, 1)[1], rtol=1e-6)


@pytest.mark.mpi(min_size=2)
def test_compressor_on_some_ranks_only(comm):
    queue = comm.mean_queue()
    queue.submit(arrays_of(comm.rank, 1), compression.get('fp16') if comm.rank else None)
    with pytest.raises(ValueError, match='used a compressor'):
        queue.wait()


def test_unused_memory_is_freed(comm):
    queue = comm.mean_queue()
    for n in range(30):
        queue.submit({f'{n}': np.zeros(1000, np.float32)})
        queue.submit({'x': np.zeros(1000, np.float32)})
        queue.wait()
    assert 2 <= len(queue._memory.nbytes) <= 6


def test_finalize_with_gradients_in_flight(comm):
    queue = comm.mean_queue()
    for n in range(comm.rank):
        queue.submit(arrays_of(comm.rank, n))
    comm.finalize()  # and once more by the fixture
