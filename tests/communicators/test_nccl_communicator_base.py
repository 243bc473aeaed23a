"""Errors of communicators on NCCL without CuPy; tests/gpu has those with CuPy."""

import chainer
import pytest
from mpi4py import MPI

import chainermn
from chainermn.communicators.non_cuda_aware_communicator import NonCudaAwareCommunicator
from chainermn.communicators.pure_nccl_communicator import PureNcclCommunicator


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
    assert f'The communicator {name} averages gradients between GPUs' in str(error)
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


def test_pure_nccl_is_the_default(monkeypatch, same_error):
    without_cupy(monkeypatch)
    check_advice(same_error(chainermn.create_communicator), 'pure_nccl')
