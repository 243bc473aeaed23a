"""An MPI library that reads device memory gets it once the device is done."""

import ctypes
import functools
import os

import chainer
import numpy as np
import pytest
from contract import OF_ARRAYS, call_with
from gpu.test_pipeline_on_gpu import check_updates
from mpi4py import MPI

import chainermn
from chainermn._commands.check.system_info import library
from chainermn.communicators.compression import get

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


OPERATIONS = {
    **{name: functools.partial(call_with, name=name) for name in OF_ARRAYS},
    'send': lambda comm, x: send_and_recv(comm, x),
    'send a tuple': lambda comm, x: send_and_recv(comm, (x, x)),
}


def send_and_recv(comm, data):
    """Send to the next rank; return the data of the previous one."""
    if RANK % 2 == 0:
        comm.send(data, (RANK + 1) % SIZE, 3)
        return comm.recv((RANK - 1) % SIZE, 3)
    received = comm.recv((RANK - 1) % SIZE, 3)
    comm.send(data, (RANK + 1) % SIZE, 3)
    return received


@pytest.mark.parametrize('operation', OPERATIONS)
def test_an_array_that_is_being_computed(comm, operation, side):
    """It is too large for the consistency check to send it along."""
    expected = OPERATIONS[operation](comm, np.full((side, side), RANK + 1.))
    found = OPERATIONS[operation](comm, slowly(RANK + 1, side))
    for x, y in zip(*(each if isinstance(each, tuple) else (each,) for each in (found, expected)),
                    strict=True):
        assert (x is None) == (y is None)
        if y is not None:
            np.testing.assert_allclose(x.get(), y, rtol=1e-4)


@pytest.mark.parametrize('compression', [None, 'fp16', '2bit'])
@pytest.mark.parametrize('batched', [True, False])
def test_compressed_gradients(comm, side, batched, compression):
    import cupy

    comm.set_config('batched_copy', batched)
    results = []
    for is_slow in (True, False):
        model = chainer.Link()
        with model.init_scope():
            model.w = chainer.Parameter(cupy.zeros((side, side), 'f'))
        model.w.grad = slowly(RANK + 1, side)
        if not is_slow:
            cupy.cuda.Device().synchronize()
        comm.multi_node_mean_grad(model, compression=get(compression))
        results.append(model.w.grad.get())
    np.testing.assert_array_equal(*results)
    if compression != '2bit':
        np.testing.assert_allclose(results[0], (SIZE + 1) / 2, rtol=1e-2)


def test_bcast_data(comm, side):
    import cupy

    model = chainer.Link()
    with model.init_scope():
        model.w = chainer.Parameter(cupy.zeros((side, side), 'f'))
    model.w.array = slowly(RANK + 1, side)
    comm.bcast_data(model)
    np.testing.assert_allclose(model.w.array.get(), 1, rtol=1e-4)


def test_mean_queue(comm, side):
    queue = comm.mean_queue()
    mean, = queue.submit({'x': slowly(RANK + 1, side)})
    queue.wait()
    np.testing.assert_allclose(mean.get(), (SIZE + 1) / 2, rtol=1e-4)


@pytest.mark.parametrize('schedule', ['1f1b', 'gpipe'])
def test_pipeline(comm, device, side, schedule):
    """MPI reads the messages from device memory, and writes them there."""
    check_updates(comm, device, side, schedule=schedule)
