"""Multi-node batch normalization on the stand-in: the backend that exchanges its statistics."""

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


def statistics_and_gradients(comm, backend, xp):
    """The statistics over the batches of all ranks; Chainer's kernels do the rest."""
    random = np.random.RandomState(RANK)
    x, gy = (xp.asarray(random.standard_normal((4, 3)).astype('f')) for _ in range(2))
    gamma = xp.asarray(np.arange(1, 4, dtype='f'))
    name = get_communication_backend(comm, backend)
    impl = MultiNodeBNImplSelector(comm, name)(None, None)
    mean, var = impl.get_mean_and_var((0,), gamma, x, xp, np.dtype('f'))
    expander = (None, Ellipsis)
    with chainer.using_config('enable_backprop', False):
        gx, _, ggamma, gbeta = impl.backward(
            (0,), gamma, gy, x, None, xp, expander, mean, 1 / xp.sqrt(var), 0, var, None)
    results = mean, var, gx, ggamma, gbeta
    assert all(chainer.backend.get_array_module(y) is xp for y in results)
    return [np.array(y) for y in results]


@pytest.mark.parametrize('backend', ['auto', 'nccl', 'mpi'], ids='by {}'.format)
def test_backend(comm, naive, gpu, backend):
    found = statistics_and_gradients(comm, backend, gpu.cupy)
    assert ('allGather on caller' in gpu.log) == (backend != 'mpi')
    assert ('allReduce on caller' in gpu.log) == (backend != 'mpi')
    for y, expected in zip(found, statistics_and_gradients(naive, 'auto', np), strict=True):
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
