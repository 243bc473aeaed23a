"""Errors of communicators on NCCL with missing requirements."""

import chainer
import pytest
from mpi4py import MPI

import chainermn
from chainermn import nccl
from chainermn.communicators.non_cuda_aware_communicator import NonCudaAwareCommunicator
from chainermn.communicators.pure_nccl_communicator import PureNcclCommunicator

LAST = MPI.COMM_WORLD.size - 1


@pytest.fixture(params=['pure_nccl', 'non_cuda_aware'])
def name(request):
    return request.param


@pytest.fixture(params=['create_communicator', 'class'])
def create(request, name):
    """Both ways to create a communicator."""
    if request.param == 'create_communicator':
        return lambda: chainermn.create_communicator(name)
    found = PureNcclCommunicator if name == 'pure_nccl' else NonCudaAwareCommunicator
    return lambda: found(MPI.COMM_WORLD)


def check_advice(error, name):
    assert isinstance(error, RuntimeError)
    assert f'The communicator {name} exchanges gradients between GPUs' in str(error)
    assert "create_communicator('auto')" in str(error)
    assert '"cupy-cuda13x[ctk]" nvidia-nccl-cu13' in str(error)


def without_cupy(monkeypatch):
    monkeypatch.setattr(chainer.backends.cuda, 'available', False)
    monkeypatch.setattr(chainer.backends.cuda, '_resolution_error',
                        ImportError("No module named 'cupy'"))


def test_no_cupy(monkeypatch, same_error, create, name):
    without_cupy(monkeypatch)
    error = same_error(create)
    assert str(error).startswith(
        "NCCL is not available: CuPy cannot be used (No module named 'cupy').")
    check_advice(error, name)


def test_no_cupy_on_one_rank(gpu, monkeypatch, same_error, create, name):
    if LAST == 0:
        pytest.skip('needs two ranks')
    if MPI.COMM_WORLD.rank == LAST:
        without_cupy(monkeypatch)
    error = same_error(create, failed=LAST)
    assert "CuPy cannot be used (No module named 'cupy')" in str(error)
    check_advice(error, name)


def test_no_device(gpu, same_error, create, name):
    def no_device():
        raise gpu.cupy.cuda.runtime.CUDARuntimeError('cudaErrorNoDevice')

    gpu.cupy.cuda.runtime.getDeviceCount = no_device
    error = same_error(create)
    assert str(error).startswith(
        'NCCL is not available: there is no GPU for CuPy (cudaErrorNoDevice).')
    check_advice(error, name)


def test_no_nccl(gpu, monkeypatch, same_error, create, name):
    monkeypatch.setattr(nccl, '_available', False)
    monkeypatch.setattr(nccl, '_reason', 'ImportError: libnccl.so.2')
    error = same_error(create)
    assert str(error).startswith(
        'NCCL is not available: CuPy cannot use the NCCL library (ImportError: libnccl.so.2).')
    check_advice(error, name)


def test_old_nccl(gpu, monkeypatch, same_error, create, name):
    monkeypatch.setattr(nccl, 'get_version', lambda: 1304)
    error = same_error(create)
    assert str(error).startswith('NCCL is not available: NCCL 1304 is too old; install 2.0')
    check_advice(error, name)


def test_pure_nccl_is_the_default(monkeypatch, same_error):
    without_cupy(monkeypatch)
    check_advice(same_error(chainermn.create_communicator), 'pure_nccl')


@pytest.mark.parametrize('old', ['hierarchical', 'two_dimensional', 'single_node'])
def test_old_names(gpu, old):
    with pytest.warns(DeprecationWarning, match='pure_nccl'):
        comm = chainermn.create_communicator(old)
    assert type(comm) is PureNcclCommunicator
    comm.finalize()
