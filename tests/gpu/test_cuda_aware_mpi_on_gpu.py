"""An MPI library that reads device memory gets it once the device is done."""

import ctypes
import os

import chainer
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn._check._system_info import library

pytestmark = [pytest.mark.gpu, pytest.mark.mpi(min_size=2)]

RANK = MPI.COMM_WORLD.rank
SIZE = MPI.COMM_WORLD.size


@pytest.fixture
def reads_device_memory(is_virtual):
    """Skips a test if the MPI library cannot access memory of a device.

    Any can access memory of a virtual GPU that is not protected.
    """
    query = getattr(ctypes.CDLL(library()), 'MPIX_Query_cuda_support', None)
    is_open = is_virtual and os.environ.get('VGPU_PROTECT') != '1'
    if not is_open and (query is None or not query()):
        pytest.skip('needs an MPI library that reads device memory')


@pytest.fixture(params=['flat', 'naive'])
def comm(request, monkeypatch, reads_device_memory):
    monkeypatch.setenv('CHAINERMN_CUDA_AWARE', '1')
    comm = chainermn.create_communicator(request.param)
    yield comm
    comm.finalize()


def slowly(value, side):
    """An array that the device is still computing."""
    import cupy

    x, ones = cupy.full((side, side), value / side, 'f'), cupy.ones((side, side), 'f')
    for _ in range(5):
        x = x @ ones / side
    return x * side


def test_gradients(comm, side):
    import cupy

    model = chainer.Link()
    with model.init_scope():
        for name in 'ab':
            setattr(model, name, chainer.Parameter(cupy.zeros((side, side), 'f')))
    for step in range(5):
        model.a.grad, model.b.grad = slowly(RANK + step, side), slowly(RANK - step, side)
        comm.multi_node_mean_grad(model)
        for param, expected in (model.a, step), (model.b, -step):
            np.testing.assert_allclose(
                param.grad.get(), expected + (SIZE - 1) / 2, rtol=1e-4, atol=1e-4)


def test_memory_that_the_device_still_writes_to(comm, side):
    """What is received into may have been the memory of an array that is being computed."""
    for step in range(5):
        x = slowly(step, side) if RANK == 0 else None
        for _ in range(3):
            slowly(77, side)  # forgotten at once
        received = comm.bcast(x)
        np.testing.assert_allclose(received.get(), step, rtol=1e-4, atol=1e-4)


def test_an_array_that_changes_after_isend(comm, side):
    if RANK == 0:
        x = slowly(3, side)
        request = comm.isend(x, 1)
        x.fill(4)
        request.wait()
    elif RANK == 1:
        np.testing.assert_allclose(comm.recv(0, 0).get(), 3, rtol=1e-4)
