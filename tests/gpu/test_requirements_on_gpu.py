"""Errors of communicators on NCCL if CuPy, a GPU or NCCL is missing, or cannot be used."""

import chainer
import pytest
from mpi4py import MPI

import chainermn
from chainermn import nccl
from chainermn.communicators.non_cuda_aware_communicator import NonCudaAwareCommunicator
from chainermn.communicators.pure_nccl_communicator import PureNcclCommunicator

pytestmark = pytest.mark.gpu

CLASSES = {'pure_nccl': PureNcclCommunicator, 'non_cuda_aware': NonCudaAwareCommunicator}
IS_LAST = MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1


@pytest.fixture(params=CLASSES)
def refused(request, same_error):
    """Check the error of both ways to create a communicator: ``refused(text)``."""
    def refused(text):
        for create in (lambda: chainermn.create_communicator(request.param),
                       lambda: CLASSES[request.param](MPI.COMM_WORLD)):
            error = same_error(create)
            assert isinstance(error, RuntimeError)
            for part in (text, "create_communicator('auto')",
                         '"cupy-cuda13x[ctk]" nvidia-nccl-cu13'):
                assert part in str(error)
    return refused


def test_no_cupy_on_one_rank(monkeypatch, refused):
    if IS_LAST:
        monkeypatch.setattr(chainer.backends.cuda, 'available', False)
        monkeypatch.setattr(chainer.backends.cuda, '_resolution_error',
                            ImportError("No module named 'cupy'"))
    refused("CuPy cannot be used (No module named 'cupy')")


def test_no_device(monkeypatch, refused):
    import cupy

    def no_device():
        raise cupy.cuda.runtime.CUDARuntimeError(100)

    monkeypatch.setattr(cupy.cuda.runtime, 'getDeviceCount', no_device)
    refused('CuPy finds no GPU (cudaErrorNoDevice')


def test_no_nccl(monkeypatch, refused):
    monkeypatch.setattr(nccl, '_available', False)
    monkeypatch.setattr(nccl, '_reason', 'ImportError: libnccl.so.2')
    refused('CuPy cannot use the NCCL library (ImportError: libnccl.so.2).')


def test_old_nccl(monkeypatch, refused):
    monkeypatch.setattr(nccl, 'get_version', lambda: 1304)
    refused('NCCL 1304 is too old; install 2.0')


@pytest.mark.parametrize('name', CLASSES)
def test_one_rank_cannot_connect(name, monkeypatch, same_error):
    """NCCL tells only that rank; the next call connects."""
    comm = chainermn.create_communicator(name)
    model = chainer.links.Linear(3, 2)
    model.to_device(f'@cupy:{chainer.backends.cuda.cupy.cuda.Device().id}')
    model.cleargrads()
    model.b.grad = model.xp.ones(2, 'f')

    def fails():
        raise nccl.NcclError(2)

    with monkeypatch.context() as context:
        if MPI.COMM_WORLD.rank == 0:
            context.setattr(nccl, 'get_unique_id', fails)
        error = same_error(comm.multi_node_mean_grad, model)
    assert isinstance(error, RuntimeError)
    assert 'NCCL_ERROR_SYSTEM_ERROR' in str(error)
    comm.multi_node_mean_grad(model)
    assert (model.b.grad == 1).all()
    comm.finalize()


def test_two_ranks_with_one_gpu(monkeypatch, same_error):
    def fails(size, unique_id, rank):
        raise nccl.NcclError(5)

    monkeypatch.setattr(nccl, 'NcclCommunicator', fails)
    comm = chainermn.create_communicator('pure_nccl')
    error = same_error(comm._context.transport.connect)
    assert 'NCCL_ERROR_INVALID_USAGE' in str(error)
    assert "chainer.get_device(f'@cupy:{comm.intra_rank}').use()" in str(error)
    comm.finalize()


def test_configuration():
    comm = chainermn.create_communicator('non_cuda_aware')
    assert not comm._chainermn_channel.can_overlap
    with pytest.raises(ValueError, match='no configuration item'):
        comm.set_config('allreduce_grad_dtype', 'float16')
    with pytest.raises(ValueError, match='is not supported by NonCudaAwareCommunicator'):
        chainermn.create_communicator('non_cuda_aware', allreduce_grad_dtype='float16')
    comm.finalize()


def test_configuration_of_pure_nccl():
    comm = chainermn.create_communicator('pure_nccl')
    assert comm._chainermn_channel.can_overlap
    assert comm.get_config('allreduce_grad_dtype') is None
    for dtype in ('float32', 'float64', 'float16'):
        comm.set_config('allreduce_grad_dtype', dtype)
        assert comm.get_config('allreduce_grad_dtype') == dtype
    for dtype in ('int32', 'complex64', bool):
        with pytest.raises(ValueError, match='float16, float32 or float64'):
            comm.set_config('allreduce_grad_dtype', dtype)
    with pytest.raises((TypeError, ValueError)):  # ml_dtypes makes it a dtype of NumPy
        comm.set_config('allreduce_grad_dtype', 'bfloat16')
    with pytest.raises(TypeError):
        comm.set_config('allreduce_grad_dtype', 'float16', other=1)
    with pytest.raises(ValueError, match='no configuration item'):
        comm.set_config('batched')
    comm.set_config('batched_copy', False)
    part = comm.split(0, 0)
    assert part.get_config() == comm.get_config()
    assert part.get_config('batched_copy') is False
    part.finalize()
    comm.finalize()

