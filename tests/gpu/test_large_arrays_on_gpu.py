"""Arrays and gradients of more than 2**31 elements."""

import chainer
import pytest
from mpi4py import MPI

import chainermn

pytestmark = [pytest.mark.gpu, pytest.mark.limit(300)]

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
N = 2**31 + 2**13 + 5
#: Where the first element, an int32 index, and the last elements are.
PARTS = [slice(0, 1), slice(1, 2**31 - 1), slice(2**31 - 1, N - 3), slice(N - 3, N)]


@pytest.fixture(autouse=True)
def memory():
    """Skips a test if the ranks do not have 20 GB each; frees the memory after it."""
    import cupy

    free = cupy.cuda.runtime.memGetInfo()[0]
    MPI.COMM_WORLD.Barrier()
    if min(MPI.COMM_WORLD.allgather(free)) < 20e9 * SIZE:
        pytest.skip('needs 20 GB of GPU memory per rank')
    yield
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.fixture
def comm():
    comm = chainermn.create_communicator('pure_nccl', allreduce_grad_dtype='float16')
    yield comm
    comm.finalize()


def fill(x, rank):
    for n, part in enumerate(PARTS):
        x[part] = n + rank


def check(x, expected):
    for n, part in enumerate(PARTS):
        assert (x[part] == n + expected).all(), part


@pytest.mark.parametrize('batched', [True, False])
def test_gradients(comm, batched):
    """In one array, and in two of which neither is large."""
    import cupy

    comm.set_config('batched_copy', batched)
    memory = cupy.empty(N, 'f2')
    for arrays in [memory], [memory[:N // 2], memory[N // 2:]]:
        model = chainer.Link()
        with model.init_scope():
            for n, x in enumerate(arrays):
                setattr(model, f'p{n}', chainer.Parameter(x))
        fill(memory, RANK)
        for param in model.params():
            param.grad = param.array  # saves memory
        comm.multi_node_mean_grad(model)
        check(memory, (SIZE - 1) / 2)


def test_bcast_data(comm):
    import cupy

    model = chainer.Link()
    with model.init_scope():
        model.p = chainer.Parameter(cupy.empty(N, 'i1'))
    fill(model.p.array, RANK)
    comm.bcast_data(model)
    check(model.p.array, 0)


def test_allreduce(comm):
    import cupy

    x = cupy.empty(N, 'i1')
    fill(x, 0)
    y = comm.allreduce(x)
    for n, part in enumerate(PARTS):
        assert (y[part] == n * SIZE).all()
