"""Multi-node batch normalization on the stand-in: its kernels, and the backend of its exchanges."""

import chainer
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn.functions.batch_normalization import (
    MultiNodeBNImplSelector,
    get_communication_backend,
)

RANK = MPI.COMM_WORLD.rank
TOLERANCE = {'e': 1e-2, 'f': 1e-5, 'd': 1e-10}


@pytest.fixture
def comm(gpu):
    comm = chainermn.create_communicator('pure_nccl')
    yield comm
    comm.finalize()


@pytest.fixture(scope='module')
def naive():
    naive = chainermn.create_communicator('naive')
    yield naive
    naive.finalize()


def statistics_and_gradients(comm, backend, xp, x, gy, dtype='f'):
    """Chainer's kernels do the rest."""
    x, gy = xp.asarray(x), xp.asarray(gy)
    axis = (0, *range(2, x.ndim))
    expander = (None, slice(None), *[None] * (x.ndim - 2))
    gamma = xp.asarray(np.arange(1, 1 + x.shape[1]).astype(dtype))
    name = get_communication_backend(comm, backend)
    impl = MultiNodeBNImplSelector(comm, name)(None, None)
    mean, var = impl.get_mean_and_var(
        axis, gamma, x, xp, np.promote_types(x.dtype, gamma.dtype))
    with chainer.using_config('enable_backprop', False):
        gx, _, ggamma, gbeta = impl.backward(
            axis, gamma, gy, x, None, xp, expander, mean, 1 / xp.sqrt(var), 0, var, None)
    results = mean, var, gx, ggamma, gbeta
    assert all(chainer.backend.get_array_module(y) is xp for y in results)
    return [np.array(y) for y in results]


def numbers(shape, dtype='f', seed=0):
    return np.random.RandomState(RANK + seed).standard_normal(shape).astype(dtype)


def compare(comm, naive, gpu, x, gy, backend='auto', dtype='f'):
    found = statistics_and_gradients(comm, backend, gpu.cupy, x, gy, dtype)
    expected = statistics_and_gradients(naive, 'auto', np, x, gy, dtype)
    tolerance = TOLERANCE[x.dtype.char]
    for y, z in zip(found, expected, strict=True):
        assert (y.dtype, y.shape) == (z.dtype, z.shape)
        scale = max(1, np.abs(z, dtype='d').max(initial=0))
        np.testing.assert_allclose(y, z, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize('backend', ['auto', 'nccl', 'mpi'], ids='by {}'.format)
def test_backend(comm, naive, gpu, backend):
    compare(comm, naive, gpu, numbers((4, 3)), numbers((4, 3), seed=9), backend)
    assert ('allGather on caller' in gpu.log) == (backend != 'mpi')
    assert ('allReduce on caller' in gpu.log) == (backend != 'mpi')


@pytest.mark.sample(9)
@pytest.mark.parametrize('dtype, of_parameters', [
    ('e', 'e'), ('e', 'f'), ('f', 'f'), ('f', 'd'), ('d', 'f'), ('d', 'd')])
@pytest.mark.parametrize('shape', [(4, 3), (2, 3, 4, 5), (7, 1, 2), (5, 40, 1)], ids=str)
def test_dtypes_and_shapes(comm, naive, gpu, shape, dtype, of_parameters):
    compare(comm, naive, gpu, numbers(shape, dtype), numbers(shape, dtype, 9), dtype=of_parameters)


def test_layouts(comm, naive, gpu):
    x, gy = (np.moveaxis(numbers((2, 4, 5, 3), seed=seed), 3, 1) for seed in (0, 9))
    assert not x.flags.c_contiguous
    compare(comm, naive, gpu, x, gy)
    compare(comm, naive, gpu, x[::2], np.broadcast_to(gy[:1, :1, :1, :1], x[::2].shape))


def test_batches_of_different_sizes(comm, naive, gpu):
    """Rank 0 has none at all."""
    if comm.size == 1:
        pytest.skip('needs two ranks')
    compare(comm, naive, gpu, numbers((3 * RANK, 3, 2)), numbers((3 * RANK, 3, 2), seed=9))


def test_far_from_zero(comm, naive, gpu):
    compare(comm, naive, gpu, numbers((50, 3), 'd') + 1e6, numbers((50, 3), 'd', 9))


def test_few_kernels(comm, gpu):
    x = numbers((2, 3, 4, 5))
    statistics_and_gradients(comm, 'auto', gpu.cupy, x, x)
    kernels = [line for line in gpu.log if line.startswith(('chainermn', 'all'))]
    assert kernels == [f'{name} on caller' for name in (
        'chainermn_batch_norm_variance', 'allGather', 'chainermn_batch_norm_merge',
        'chainermn_batch_norm_gamma_gradient', 'allReduce', 'chainermn_batch_norm_input_gradient')]
