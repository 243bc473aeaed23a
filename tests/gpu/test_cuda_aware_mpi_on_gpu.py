"""An MPI library that reads device memory gets it once the device is done."""

import ctypes

import chainer
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn._check._system_info import library

pytestmark = [pytest.mark.gpu, pytest.mark.mpi(min_size=2)]

RANK = MPI.COMM_WORLD.rank
SIZE = MPI.COMM_WORLD.size


@pytest.fixture(params=['flat', 'naive'])
def comm(request, monkeypatch):
    query = getattr(ctypes.CDLL(library()), 'MPIX_Query_cuda_support', None)
    if query is None or not query():
        pytest.skip('needs an MPI library that reads device memory')
    monkeypatch.setenv('CHAINERMN_CUDA_AWARE', '1')
    comm = chainermn.create_communicator(request.param)
    yield comm
    comm.finalize()


def slowly(value):
    """An array that the device is still computing."""
    import cupy

    x, ones = cupy.full((2000, 2000), value / 2000, 'f'), cupy.ones((2000, 2000), 'f')
    for _ in range(5):
        x = x @ ones / 2000
    return x * 2000


def test_gradients(comm):
    import cupy

    model = chainer.Link()
    with model.init_scope():
        for name in 'ab':
            setattr(model, name, chainer.Parameter(cupy.zeros((2000, 2000), 'f')))
    for step in range(5):
        model.a.grad, model.b.grad = slowly(RANK + step), slowly(RANK - step)
        comm.multi_node_mean_grad(model)
        for param, expected in (model.a, step), (model.b, -step):
            np.testing.assert_allclose(
                param.grad.get(), expected + (SIZE - 1) / 2, rtol=1e-4, atol=1e-4)


def test_memory_that_the_device_still_writes_to(comm):
    """What is received into may have been the memory of an array that is being computed."""
    for step in range(5):
        x = slowly(step) if RANK == 0 else None
        for _ in range(3):
            slowly(77)  # forgotten at once
        received = comm.bcast(x)
        np.testing.assert_allclose(received.get(), step, rtol=1e-4, atol=1e-4)
