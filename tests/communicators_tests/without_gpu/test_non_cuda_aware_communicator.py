"""non_cuda_aware on the stand-in: NCCL within made-up nodes, MPI between them."""

import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn import nccl

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank


@pytest.fixture(params=[1, 2], ids=['one node', 'two nodes'])
def comm(request, gpu, monkeypatch):
    name = f'node {RANK * request.param // SIZE}'
    monkeypatch.setattr(MPI, 'Get_processor_name', lambda: name)
    comm = chainermn.create_communicator('non_cuda_aware')
    assert comm.inter_size == min(request.param, SIZE)
    yield comm
    comm.finalize()


@pytest.mark.parametrize('batched', [True, False])
def test_mean_grad(comm, gpu, make_model, batched):
    comm.set_config('batched_copy', batched)
    models = [make_model(rank) for rank in range(SIZE)]
    expected = {name: np.mean([getattr(model, name).grad.astype('f8') for model in models], axis=0)
                for name in 'abcde'}
    model = models[RANK]
    comm.multi_node_mean_grad(model)
    for name, value in expected.items():
        grad = getattr(model, name).grad
        tolerance = np.finfo(grad.dtype).eps * 4
        np.testing.assert_allclose(grad.astype('f8'), value, tolerance, tolerance)
    assert model.unused.grad is None
    everywhere = MPI.COMM_WORLD.allgather([getattr(model, name).grad.tobytes() for name in 'abcde'])
    assert everywhere == everywhere[:1] * SIZE
    assert {line for line in gpu.log if 'pack' not in line} == {
        'reduce on caller', 'bcast on caller'}


def test_bcast_data(comm, make_model):
    model = make_model(RANK)
    comm.bcast_data(model)
    for name in 'abcd':
        np.testing.assert_array_equal(
            getattr(model, name).array, getattr(make_model(0), name).array)


def test_model_on_the_host(comm, make_model, same_error):
    model = make_model(RANK)
    if RANK == 0:
        model.b.array = np.array(model.b.array)
        model.b.grad = np.array(model.b.grad)
    error = same_error(comm.multi_node_mean_grad, model, failed=0)
    assert 'non_cuda_aware takes models on a GPU' in str(error)


def test_connection_failure_on_one_node(comm, monkeypatch, make_model, same_error):
    def get_unique_id():
        if RANK == 0:
            raise nccl.NcclError('NCCL_ERROR_SYSTEM_ERROR')
        return RANK

    with monkeypatch.context() as context:
        context.setattr(nccl, 'get_unique_id', get_unique_id)
        error = same_error(comm.multi_node_mean_grad, make_model(RANK), failed=0)
    assert isinstance(error, RuntimeError)
    assert 'NCCL_ERROR_SYSTEM_ERROR' in str(error)
    comm.multi_node_mean_grad(make_model(RANK))


def test_config(comm):
    assert not comm.can_overlap
    with pytest.raises(ValueError, match='use pure_nccl'):
        comm.multi_node_mean_grad_async(None)
    with pytest.raises(ValueError, match='no configuration item'):
        comm.set_config('allreduce_grad_dtype', np.float16)
    with pytest.raises(ValueError, match='is not supported by NonCudaAwareCommunicator'):
        chainermn.create_communicator('non_cuda_aware', allreduce_grad_dtype=np.float16)
    part = comm.split(0, -RANK)
    assert part.get_config() == comm.get_config()
    part.finalize()
