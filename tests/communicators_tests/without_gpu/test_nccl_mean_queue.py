"""Means in the background by NCCL, on a stream that runs at once and on one that runs late."""

import itertools

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from each_case import each_case
from mpi4py import MPI

import chainermn
from chainermn._transport import batched_copy
from chainermn.communicators import compression

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank


@pytest.fixture(params=[False, True], ids=['at once', 'late'])
def comm(request, gpu):
    comm = chainermn.create_communicator('pure_nccl')
    gpu.late = request.param
    yield comm
    gpu.late = False
    comm.finalize()


def arrays_of(gpu, rank, number, dtypes=('f4',) * 3):
    return {f'{number}/{i}': gpu.cupy.asarray((np.arange(size) % 7 + rank + number).astype(dtype))
            for i, (size, dtype) in enumerate(zip((3, 9000, 1), dtypes, strict=True))}


def means_of(gpu, number, dtypes=('f4',) * 3):
    ranks = [arrays_of(gpu, rank, number, dtypes) for rank in range(SIZE)]
    return [sum(arrays[path].get().astype('d') for arrays in ranks) / SIZE for path in ranks[0]]


def check(means, expected, tolerance=1e-6):
    for mean, value in zip(means, expected, strict=True):
        np.testing.assert_allclose(mean.get(), value, tolerance)


@each_case('dtypes, grad_dtype, batched', itertools.product(
    [['f2'] * 3, ['f4'] * 3, ['f8'] * 3, ['f2', 'f4', 'f8']], ['float16', 'float32', 'float64'],
    [True, False]))
def test_means(comm, gpu, dtypes, grad_dtype, batched):
    comm.set_config('allreduce_grad_dtype', grad_dtype)
    comm.set_config('batched_copy', batched)
    queue = comm.mean_queue()
    for name in ('allreduce_grad_dtype', 'batched_copy'):
        queue_comm = comm._background
        queue_comm.set_config(name, comm.get_config(name))
    sent = [arrays_of(gpu, RANK, n, dtypes) for n in range(4)]
    results = [queue.submit(arrays) for arrays in sent]
    queue.wait()
    for n, (arrays, means) in enumerate(zip(sent, results, strict=True)):
        check(means, means_of(gpu, n, dtypes), 2e-3)
        assert [mean.dtype for mean in means] == [x.dtype for x in arrays.values()]
        for path, x in arrays_of(gpu, RANK, n, dtypes).items():
            np.testing.assert_array_equal(arrays[path].get(), x.get())


@pytest.mark.parametrize('kind', [None, 'fp16', 'bf16', '2bit'])
def test_submitted_arrays_do_not_change(comm, gpu, kind):
    """A single array needs no packing, and may be read by backward, or be submitted again."""
    queue = comm.mean_queue()
    x = gpu.cupy.asarray(np.arange(1, 5, dtype='f4') * (RANK + 1))
    compressor = compression.get(kind)
    first, = queue.submit({'a': x}, compressor)
    second, = queue.submit({'b': x}, compressor)
    both = queue.submit({'c': x, 'd': x}, compressor)
    queue.wait()
    np.testing.assert_array_equal(x.get(), np.arange(1, 5) * (RANK + 1))
    if kind != '2bit':
        expected = np.arange(1, 5) * (SIZE + 1) / 2
        check([first, second, *both], [expected] * 4, 1e-6 if kind is None else 1e-2)
    results = [first, second, *both]
    for n, y in enumerate(results):  # to write to one changes no other
        assert not any(np.may_share_memory(y, other) for other in [x, *results[n + 1:]])


def test_several_dtypes_and_shapes(comm, gpu):
    queue = comm.mean_queue()
    x = gpu.cupy.asarray(np.full((2, 3), RANK, 'f4'))
    means = queue.submit({
        'a': x, 'b': x.T, 'c': gpu.cupy.asarray(np.float64([RANK])),
        'd': gpu.cupy.asarray(np.empty((0, 2), 'f2')), 'e': gpu.cupy.asarray(np.float32(RANK))})
    queue.wait()
    for mean, shape in zip(means, [(2, 3), (3, 2), (1,), (0, 2), ()], strict=True):
        assert mean.shape == shape
        assert (mean.get() == (SIZE - 1) / 2).all()


def test_submitted_arrays_stay_alive(comm, gpu):
    """The stand-in detects arrays freed before the device has read them."""
    queue = comm.mean_queue()
    results = []
    for n in range(3):
        arrays = arrays_of(gpu, RANK, n)
        results.append(queue.submit(dict(arrays)))
        results.append(queue.submit({'x': arrays.pop(f'{n}/1')}))
        del arrays
    queue.wait()
    for n in range(3):
        check(results[2 * n], means_of(gpu, n))
        check(results[2 * n + 1], means_of(gpu, n)[1:2])


def test_results_stay(comm, gpu):
    queue = comm.mean_queue()
    kept = []
    for n in range(4):
        kept.append(queue.submit(arrays_of(gpu, RANK, n)))
        queue.wait()
    for n, means in enumerate(kept):
        check(means, means_of(gpu, n))


def test_nothing_is_copied_twice(gpu):
    """Only one more set of arrays is allocated, for the exchange and the result."""
    comm = chainermn.create_communicator('pure_nccl')
    queue = comm.mean_queue()
    gpu.late = True
    arrays = arrays_of(gpu, RANK, 0)
    means = queue.submit(arrays)
    size = sum(x.nbytes for x in arrays.values())
    stream = comm._background._transport._stream
    assert size <= sum(memory.nbytes for memory in stream.own) < 1.5 * size
    assert [line for line in gpu.log if 'pack' in line] == ['pack on own']
    queue.wait()
    check(means, means_of(gpu, 0))
    gpu.late = False
    comm.finalize()


def test_one_table_for_each_bucket(comm, gpu):
    """For any number of buckets, if arrays reappear at the same addresses."""
    comm.set_config('allreduce_grad_dtype', np.float16)
    queue = comm.mean_queue()
    comm._background.set_config('allreduce_grad_dtype', np.float16)
    buckets = [arrays_of(gpu, RANK, n) for n in range(100)]
    kept = []
    for _ in range(3):
        kept.append([queue.submit(bucket) for bucket in buckets])  # at other addresses each time
        queue.wait()
    assert batched_copy.tables.n_made == 100 + 3 * 100  # to pack, and to unpack


def test_order_on_the_streams(comm, gpu):
    queue = comm.mean_queue()
    gpu.log.clear()
    assert not queue.pending
    queue.submit(arrays_of(gpu, RANK, 0))
    assert queue.pending
    queue.submit(arrays_of(gpu, RANK, 1))
    submitted = ['own waits for caller', 'pack on own', 'allReduce on own']
    assert gpu.log == 2 * submitted
    queue.wait()
    assert not queue.pending
    queue.wait()
    assert gpu.log == [*submitted, *submitted, 'caller waits for own']


@each_case('n_submitted, kind', itertools.product(
    [lambda rank: rank, lambda rank: 3 - min(rank, 3), lambda rank: 2, lambda rank: 0,
     lambda rank: 4 * (rank == 0)], [None, 'fp16', 'bf16', '2bit']))
def test_cancel(comm, gpu, n_submitted, kind):
    gpu.late = True  # "at once" the stand-in would wait for the other ranks
    queue = comm.mean_queue()
    compressor = compression.get(kind)
    for _ in range(2):
        for n in range(n_submitted(RANK)):
            queue.submit(arrays_of(gpu, RANK, n), compressor)
        queue.cancel()
        assert not queue.pending
        means = queue.submit(arrays_of(gpu, RANK, 9))
        queue.wait()
        check(means, means_of(gpu, 9))


def test_finalize_with_gradients_in_flight(comm, gpu):
    gpu.late = True
    queue = comm.mean_queue()
    for n in range(RANK):
        queue.submit(arrays_of(gpu, RANK, n))
    comm.finalize()  # and once more by the fixture


# --- what overlap makes of it --------------------------------------------------------------------


class Called(chainer.Chain):
    """Calls its links and parameters by a function given to it."""

    def __init__(self, call, **children):
        super().__init__()
        with self.init_scope():
            for name, child in children.items():
                setattr(self, name, child)
        self.call = call

    def forward(self, x):
        return self.call(self, x)


def parameter(*shape):
    return chainer.Parameter(np.random.standard_normal(shape).astype('f4'))


def sum_of_weights():
    """Both weights share one gradient array: Chainer's ``add`` passes it to both."""
    return Called(lambda m, x: F.linear(F.tanh(m.first(x)), m.a + m.b),
                  first=L.Linear(6, 8), a=parameter(4, 8), b=parameter(4, 8))


def bias_of_full_shape():
    """The gradient of the parameter is the array with which backward continues."""
    return Called(lambda m, x: m.last(F.tanh(m.first(x) + m.p)),
                  first=L.Linear(6, 8), p=parameter(5, 8), last=L.Linear(8, 4))


def several_times():
    return Called(lambda m, x: m.last(F.tanh(m.again(F.tanh(m.again(m.first(x)))))),
                  first=L.Linear(6, 8), again=L.Linear(8, 8), last=L.Linear(8, 4))


def perceptron():
    return chainer.Sequential(L.Linear(6, 8), F.tanh, L.Linear(8, 7), F.tanh, L.Linear(7, 4))


def trained(gpu, comm, make, steps=5, **options):
    np.random.seed(3)
    model = make()
    for param in model.params():
        param.array = gpu.cupy.asarray(param.array)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(.1), comm, **options).setup(model)
    for n in range(steps):
        random = np.random.RandomState(100 * n + RANK)
        x, t = (gpu.cupy.asarray(random.standard_normal((5, n)).astype('f4')) for n in (6, 4))
        optimizer.update(lambda x=x, t=t: F.mean_squared_error(model(x), t))
    return optimizer, {path: param.array.get() for path, param in model.namedparams()}


OVERLAPS = [*itertools.product(
    [sum_of_weights, bias_of_full_shape, several_times, perceptron],
    [{}, {'compression': 'fp16'}, {'compression': 'bf16'}, {'n_accumulations': 2}],
    [1e-6, 200 / 2**20])]


@each_case('make, options, bucket_mb',
           lambda config: OVERLAPS if config.getoption('full') else OVERLAPS[::3])
def test_the_same_bits_as_without_overlap(comm, gpu, make, options, bucket_mb):
    _, expected = trained(gpu, comm, make, **options)
    optimizer, found = trained(gpu, comm, make, overlap=True, bucket_mb=bucket_mb, **options)
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)
    if SIZE > 1:  # one rank alone exchanges nothing
        assert optimizer.n_early > 0
        assert bucket_mb > 1e-5 or all(len(bucket) == 1 for bucket in optimizer.buckets)
