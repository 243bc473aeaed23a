"""How many kernels, copies and NCCL calls an operation takes, as the virtual GPU counts them."""

import chainer
import numpy as np
import pytest
from contract import call_with
from mpi4py import MPI
from virtual_gpu.counters import counting

import chainermn
from chainermn.functions.batch_normalization import MultiNodeBNImplSelector

pytestmark = pytest.mark.gpu

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank


@pytest.fixture
def comm(is_virtual):
    if not is_virtual:
        pytest.skip('needs the virtual GPU')
    comm = chainermn.create_communicator('pure_nccl')
    yield comm
    comm.finalize()


def test_an_update(comm):
    """One kernel packs all gradients, one unpacks them; the host does not wait."""
    import cupy

    model = chainer.Link()
    with model.init_scope():
        for n in range(20):
            param = chainer.Parameter(cupy.zeros(100 * n, 'f'))
            param.grad = cupy.ones(100 * n, 'f')
            setattr(model, f'p{n}', param)
    for _ in range(3):  # the first one uploads the table
        with counting() as counted:
            comm.multi_node_mean_grad(model)
    names = ('launches', 'nccl_calls', 'synchronizations', 'bytes_to_device', 'bytes_to_host',
             'bytes_within_device', 'allocations')
    assert {name: counted[name] for name in names} == dict.fromkeys(names, 0) | {
        'launches': 2, 'nccl_calls': 1}


OPERATIONS = ['bcast', 'allgather', 'allreduce', 'allreduce_many', 'reduce', 'reduce_scatter']


@pytest.mark.parametrize('dtype', ['bool', 'int16', 'int32', 'float16', 'float64', 'complex64'])
@pytest.mark.parametrize('operation', OPERATIONS)
def test_arrays_that_nccl_carries(comm, operation, dtype):
    """It moves arrays of all dtypes, and reduces those that it knows."""
    import cupy

    x = cupy.ones((40, 60), dtype)
    with counting() as counted:
        call_with(comm, x, operation)
    moves = operation in ('bcast', 'allgather')
    assert (counted['nccl_calls'] > 0) == (moves or dtype not in ('bool', 'int16', 'complex64'))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('operation', [
    name for name in OPERATIONS if name != 'bcast'])  # there, only the root's array counts
def test_arrays_that_mpi_carries(comm, operation):
    """An array on the host of one rank, and arrays of different lengths."""
    import cupy

    x = np.ones((4, 6), 'f')
    with counting() as counted:
        call_with(comm, x if RANK == SIZE - 1 else cupy.asarray(x), operation)
        comm.allgather(cupy.ones(RANK + 2))
        comm.reduce_scatter([cupy.ones(rank + 2) for rank in range(SIZE)])
    assert counted['nccl_calls'] == 0


def test_batch_normalization(comm):
    """One exchange forward and one backward, and as many kernels with any number of ranks."""
    import cupy

    x = cupy.asarray(np.random.RandomState(RANK).rand(2, 3, 4, 5).astype('f'))
    axis, expander = (0, 2, 3), (None, slice(None), None, None)
    gamma = cupy.ones(3, 'f')
    impl = MultiNodeBNImplSelector(comm, 'nccl')(None, None)
    for _ in range(2):  # the first one connects
        with counting() as forward:
            mean, var = impl.get_mean_and_var(axis, gamma, x, cupy, x.dtype)
        inv_std = 1 / cupy.sqrt(var)
        with counting() as backward, chainer.using_config('enable_backprop', False):
            impl.backward(axis, gamma, x, x, None, cupy, expander, mean, inv_std, 0, var, None)
    assert forward['nccl_calls'] == backward['nccl_calls'] == 1
    assert (forward['launches'], backward['launches']) == (4, 5)
