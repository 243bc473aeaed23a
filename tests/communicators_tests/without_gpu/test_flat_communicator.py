"""flat on the stand-in: one buffer for device arrays, which are distinguished from host arrays."""

import numpy as np
import pytest
from mpi4py import MPI

import chainermn

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank


@pytest.fixture
def comm(gpu):
    comm = chainermn.create_communicator('flat')
    yield comm
    comm.finalize()


def test_mean_grad(comm, make_model):
    models = [make_model(rank) for rank in range(SIZE)]
    expected = {name: np.mean([getattr(model, name).grad.get().astype('f8') for model in models],
                              axis=0) for name in 'abcde'}
    comm.multi_node_mean_grad(models[RANK])
    for name, value in expected.items():
        grad = getattr(models[RANK], name).grad.get()
        tolerance = np.finfo(grad.dtype).eps * 4
        np.testing.assert_allclose(grad.astype('f8'), value, tolerance, tolerance)


@pytest.mark.mpi(min_size=2)
def test_parameters_that_differ(comm, make_model, same_error):
    model = make_model(RANK)
    if RANK == 1:
        model.a.grad = None
    error = same_error(comm.multi_node_mean_grad, model)
    assert '/a: float16 (3, 4) on device on rank' in str(error)
    assert 'nothing on rank 1' in str(error)
