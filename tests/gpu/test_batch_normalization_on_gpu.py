"""Multi-node batch normalization on a GPU: the same as Chainer's with the batches of all ranks."""


import chainer
import chainer.functions as F
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn.links import MultiNodeBatchNormalization

pytestmark = pytest.mark.gpu

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
TOLERANCE = {'float16': 1e-2, 'float32': 1e-4, 'float64': 1e-10}
SHAPES = {'dense': (5, 3), 'convolution': (4, 3, 5, 7), 'one channel': (6, 1, 2),
          'many channels': (2, 300, 3, 3), 'many elements': (8, 2, 64, 64)}


@pytest.fixture(params=['pure_nccl', 'non_cuda_aware', 'flat'])
def comm(request):
    comm = chainermn.create_communicator(request.param)
    yield comm
    comm.finalize()


def run(bn, x, weight):
    """Forward, and backward from a loss with a different weight for each element."""
    x = chainer.Variable(x)
    bn.cleargrads()
    y = bn(x)
    F.sum(F.cast(y, np.float64) * weight).backward()
    return y.array, x.grad


def compare(comm, xs, weights, dtype, parameters=None, **options):
    """Compare with one process that has the batches of all ranks."""
    import cupy

    size = xs[0].shape[1]
    parameters = parameters or ('float64' if dtype == 'float64' else 'float32')
    one = chainer.links.BatchNormalization(size, dtype=np.dtype(parameters), initial_avg_var=0)
    ours = MultiNodeBatchNormalization(size, comm, dtype=np.dtype(parameters), **options)
    for bn in one, ours:
        bn.to_device(f'@cupy:{cupy.cuda.Device().id}')
    for _ in range(3):
        expected = run(one, cupy.asarray(np.concatenate(xs)),
                       cupy.asarray(np.concatenate(weights)))
        found = run(ours, cupy.asarray(xs[RANK]), cupy.asarray(weights[RANK]))
    begin = sum(len(x) for x in xs[:RANK])
    tolerance = max(TOLERANCE[dtype], TOLERANCE[parameters])
    close = {'rtol': tolerance, 'atol': tolerance}
    for y, all_y in zip(found, expected, strict=True):
        assert type(y) is cupy.ndarray and y.dtype == dtype
        np.testing.assert_allclose(y.get(), all_y[begin:begin + len(y)].get(), **close)
    np.testing.assert_allclose(ours.avg_mean.get(), one.avg_mean.get(), **close)
    np.testing.assert_allclose(ours.avg_var.get(), one.avg_var.get(), **close)
    # The optimizer averages the gradients of losses that are summed here.
    scale = float(max(abs(one.gamma.grad).max(), abs(one.beta.grad).max()))
    for name in 'gamma', 'beta':
        grads = [getattr(bn, name).grad.get() / scale for bn in (ours, one)]
        np.testing.assert_allclose(grads[0] * SIZE, grads[1], **close)
    bits = MPI.COMM_WORLD.allgather(ours.avg_mean.tobytes() + ours.gamma.grad.tobytes())
    assert bits == bits[:1] * SIZE


@pytest.mark.parametrize('dtype', TOLERANCE)
@pytest.mark.parametrize('shape', SHAPES)
def test_as_in_one_process(comm, shape, dtype):
    random = np.random.RandomState(0)
    xs = [random.normal(1, 2, SHAPES[shape]).astype(dtype) for _ in range(SIZE)]
    compare(comm, xs, [random.normal(0, 1, SHAPES[shape]) for _ in range(SIZE)], dtype)


@pytest.mark.parametrize('backend', ['mpi', 'nccl'], ids='by {}'.format)
def test_backend(backend):
    comm = chainermn.create_communicator('pure_nccl')
    random = np.random.RandomState(0)
    xs = [random.normal(1, 2, (4, 3, 5, 7)).astype('f') for _ in range(SIZE)]
    compare(comm, xs, xs, 'float32', communication_backend=backend)
    comm.finalize()


@pytest.mark.parametrize('dtype, parameters', [
    ('float16', 'float16'), ('float32', 'float64'), ('float64', 'float32')])
def test_parameters_of_other_dtypes(comm, dtype, parameters):
    random = np.random.RandomState(0)
    xs = [random.normal(1, 2, (4, 3, 5)).astype(dtype) for _ in range(SIZE)]
    compare(comm, xs, xs, dtype, parameters)


@pytest.mark.parametrize('smallest', [0, 2])
def test_batches_of_different_sizes(comm, smallest):
    """Rank 0 may have none at all."""
    if smallest == 0 and SIZE == 1:
        pytest.skip('needs two ranks')
    random = np.random.RandomState(0)
    xs = [random.normal(1, 2, (smallest + 3 * rank, 3, 4)).astype('f') for rank in range(SIZE)]
    compare(comm, xs, xs, 'float32')


def test_an_array_that_is_not_contiguous(comm):
    import cupy

    x = cupy.asarray(np.random.RandomState(RANK).rand(6, 4, 8).astype('f'))
    outputs = []
    for array in x[::2, :, ::3], cupy.ascontiguousarray(x[::2, :, ::3]):
        bn = MultiNodeBatchNormalization(4, comm)
        bn.to_device(f'@cupy:{cupy.cuda.Device().id}')
        outputs.append(run(bn, array, cupy.ones(array.shape)))
    for y, expected in zip(*outputs, strict=True):
        np.testing.assert_allclose(y.get(), expected.get(), rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_one_number(comm):
    """Chainer broadcasts it, without a copy."""
    import cupy

    x = cupy.asarray(np.random.RandomState(RANK).rand(6, 4, 8).astype('f'))
    gradients = []
    for gy in cupy.broadcast_to(cupy.full((), 2, 'f'), x.shape), cupy.full(x.shape, 2, 'f'):
        bn = MultiNodeBatchNormalization(4, comm)
        bn.to_device(f'@cupy:{cupy.cuda.Device().id}')
        bn.cleargrads()
        y = bn(x)
        y.grad = gy
        y.backward()
        gradients.append(bn.beta.grad.get())
    np.testing.assert_allclose(*gradients, rtol=1e-5)


def test_far_from_zero(comm):
    """The difference of mean square and squared mean would have no correct digit here."""
    import cupy

    xs = [np.random.RandomState(rank).normal(1e4, 1, (50, 1)).astype('f') for rank in range(SIZE)]
    bn = MultiNodeBatchNormalization(1, comm)
    bn.to_device(f'@cupy:{cupy.cuda.Device().id}')
    everything = np.concatenate(xs).astype('d')
    expected = (xs[RANK] - everything.mean()) / everything.std()
    np.testing.assert_allclose(bn(cupy.asarray(xs[RANK])).array.get(), expected, atol=5e-3)

