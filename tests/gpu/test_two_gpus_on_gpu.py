"""A process that sees several GPUs."""

import chainer
import numpy as np
import pytest
from mpi4py import MPI

import chainermn

pytestmark = pytest.mark.gpu

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank


@pytest.fixture
def other(device):
    """A GPU that is not the current one."""
    import cupy

    count = min(MPI.COMM_WORLD.allgather(cupy.cuda.runtime.getDeviceCount()))
    if count < 2:
        pytest.skip('needs two GPUs')
    return cupy.cuda.Device((device.id + 1) % count)


def model_on(device):
    model = chainer.links.Linear(3, 2)
    model.to_device(f'@cupy:{device.id}')
    with device:
        for param in model.params():
            param.grad = model.xp.full(param.shape, RANK, 'f')
    return model


@pytest.mark.parametrize('name', ['pure_nccl', 'non_cuda_aware'])
def test_a_model_on_a_device_that_is_not_selected(comm, device, other):
    """Its device becomes the current one before NCCL connects."""
    import cupy

    model = model_on(other)
    comm.multi_node_mean_grad(model)
    assert cupy.cuda.Device() == other
    np.testing.assert_allclose(model.W.grad.get(), (SIZE - 1) / 2)


@pytest.mark.parametrize('name', ['pure_nccl', 'non_cuda_aware'])
def test_a_model_on_two_devices(comm, device, other, same_error):
    model = model_on(device)
    if RANK == SIZE - 1:
        model.b.to_device(f'@cupy:{other.id}')
    error = same_error(comm.multi_node_mean_grad, model)
    assert isinstance(error, ValueError)
    assert 'is the current one' in str(error)


@pytest.mark.parametrize('name', ['pure_nccl', 'non_cuda_aware'])
def test_a_second_model_on_another_device(comm, device, other, same_error):
    comm.multi_node_mean_grad(model_on(device))
    with other:
        error = same_error(comm.multi_node_mean_grad, model_on(other))
    assert isinstance(error, ValueError)
    assert 'create another communicator for it' in str(error)


@pytest.mark.parametrize('name', ['pure_nccl', 'non_cuda_aware', 'flat', 'naive'])
def test_each_communicator_has_its_device(name, device, other):
    """Two communicators in one process, with models on different devices."""
    for each in device, other:
        with each:
            comm = chainermn.create_communicator(name)
            model = model_on(each)
            comm.multi_node_mean_grad(model)
            assert model.W.grad.device == each
            np.testing.assert_allclose(model.W.grad.get(), (SIZE - 1) / 2)
            comm.finalize()


@pytest.mark.parametrize('name', ['pure_nccl', 'flat'])
def test_results_are_on_the_current_device(comm, other):
    """Not on the first one. All ranks change their device, so that no two share one."""
    import cupy

    with other:
        x = cupy.full((3, 4), RANK, 'f')
        for y in (comm.allreduce(x), *comm.allgather(x), comm.bcast(x)):
            assert y.device == other
