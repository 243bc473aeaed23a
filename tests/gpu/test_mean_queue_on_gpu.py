"""Means in the background by NCCL, on a stream of its own."""

import itertools

import numpy as np
import pytest
from each_case import each_case
from mpi4py import MPI

import chainermn
from chainermn._transport import batched_copy
from chainermn.communicators import compression

pytestmark = pytest.mark.gpu

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank


@pytest.fixture
def name():
    return 'pure_nccl'


def arrays_of(rank, number, dtypes=('f4',) * 3):
    import cupy

    return {f'{number}/{i}': cupy.asarray((np.arange(size) % 7 + rank + number).astype(dtype))
            for i, (size, dtype) in enumerate(zip((3, 9000, 1), dtypes, strict=True))}


def means_of(number, dtypes=('f4',) * 3):
    ranks = [arrays_of(rank, number, dtypes) for rank in range(SIZE)]
    return [sum(arrays[path].get().astype('d') for arrays in ranks) / SIZE for path in ranks[0]]


def check(means, expected, tolerance=1e-6):
    for mean, value in zip(means, expected, strict=True):
        np.testing.assert_allclose(mean.get(), value, tolerance)


@each_case('dtypes, grad_dtype, batched', itertools.product(
    [['f2'] * 3, ['f4'] * 3, ['f8'] * 3, ['f2', 'f4', 'f8']], ['float16', 'float32', 'float64'],
    [True, False]))
def test_means(dtypes, grad_dtype, batched):
    comm = chainermn.create_communicator(
        'pure_nccl', allreduce_grad_dtype=grad_dtype, batched_copy=batched)
    queue = comm.mean_queue()
    sent = [arrays_of(RANK, n, dtypes) for n in range(4)]
    results = [queue.submit(arrays) for arrays in sent]
    assert queue.pending
    queue.wait()
    assert not queue.pending
    for n, (arrays, means) in enumerate(zip(sent, results, strict=True)):
        check(means, means_of(n, dtypes), 2e-3)
        assert [mean.dtype for mean in means] == [x.dtype for x in arrays.values()]
        for path, x in arrays_of(RANK, n, dtypes).items():
            np.testing.assert_array_equal(arrays[path].get(), x.get())
    comm.finalize()


@pytest.mark.parametrize('kind', [None, 'fp16', 'bf16', '2bit'])
def test_submitted_arrays_do_not_change(comm, kind):
    """A single array needs no packing, and may be read by backward, or be submitted again."""
    import cupy

    queue = comm.mean_queue()
    x = cupy.arange(1, 5, dtype='f4') * (RANK + 1)
    compressor = compression.get(kind)
    first, = queue.submit({'a': x}, compressor)
    second, = queue.submit({'b': x}, compressor)
    both = queue.submit({'c': x, 'd': x}, compressor)
    queue.wait()
    results = [first, second, *both]
    np.testing.assert_array_equal(x.get(), np.arange(1, 5) * (RANK + 1))
    if kind != '2bit':
        expected = np.arange(1, 5) * (SIZE + 1) / 2
        check(results, [expected] * 4, 1e-6 if kind is None else 1e-2)
    for n, y in enumerate(results):  # to write to one changes no other
        assert not any(cupy.may_share_memory(y, other) for other in [x, *results[n + 1:]])


def test_submitted_arrays_and_results_stay_alive(comm):
    import cupy

    queue = comm.mean_queue()
    results = []
    for n in range(3):
        arrays = arrays_of(RANK, n)
        results.append((n, 0, queue.submit(dict(arrays))))
        results.append((n, 1, queue.submit({'x': arrays.pop(f'{n}/1')})))
        del arrays
        for size in (3, 9000, 1):
            cupy.full(size, np.nan, 'f4')  # takes memory that is free
        if n == 1:
            queue.wait()
    queue.wait()
    for n, is_single, means in results:
        check(means, means_of(n)[1:2] if is_single else means_of(n))


def test_nothing_is_copied_twice(comm):
    """Only one more set of arrays is allocated, for the exchange and the result."""
    import cupy

    queue = comm.mean_queue()
    arrays = arrays_of(RANK, 0)
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    means = queue.submit(arrays)
    size = sum(x.nbytes for x in arrays.values())
    assert size <= pool.used_bytes() - before < 1.5 * size
    queue.wait()
    check(means, means_of(0))


def test_one_table_for_each_bucket(comm):
    """For any number of buckets, if arrays reappear at the same addresses."""
    comm.set_config('allreduce_grad_dtype', 'float16')
    queue = comm.mean_queue()
    buckets = [arrays_of(RANK, n) for n in range(100)]
    before = batched_copy.tables.n_made
    kept = []
    for _ in range(3):
        kept.append([queue.submit(bucket) for bucket in buckets])  # at other addresses each time
        queue.wait()
    assert batched_copy.tables.n_made - before <= 100 + 3 * 100  # to pack, and to unpack


@each_case('n_submitted, kind', itertools.product(
    [lambda rank: rank, lambda rank: 3 - min(rank, 3), lambda rank: 2, lambda rank: 0,
     lambda rank: 4 * (rank == 0)], [None, 'fp16', 'bf16', '2bit']))
def test_cancel(comm, n_submitted, kind):
    """Ranks that submit more and less continue together."""
    queue = comm.mean_queue()
    compressor = compression.get(kind)
    for _ in range(2):
        for n in range(n_submitted(RANK)):
            queue.submit(arrays_of(RANK, n), compressor)
        queue.cancel()
        assert not queue.pending
        means = queue.submit(arrays_of(RANK, 9))
        queue.wait()
        check(means, means_of(9))


def test_finalize_with_gradients_in_flight(comm):
    queue = comm.mean_queue()
    for n in range(RANK):
        queue.submit(arrays_of(RANK, n))
    comm.finalize()  # and once more by the fixture

