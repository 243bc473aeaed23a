"""Sharded optimizer states: NCCL's reduce-scatter of gradients and all-gather of parameters."""

import itertools

import numpy as np
import pytest
from each_case import each_case
from mpi4py import MPI

import chainermn
from chainermn.communicators.transport import ArrayList

pytestmark = pytest.mark.gpu

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
SHAPES = [(3,), (), (100, 7), (0, 2), (1,), (64, 3), (5000,), (2, 2, 2)]
OWNERS = {
    'nearly equal': [n * SIZE // len(SHAPES) for n in range(len(SHAPES))],
    'one rank has all': [SIZE - 1] * len(SHAPES),
    'the first has none': sorted(max(n % SIZE, min(1, SIZE - 1)) for n in range(len(SHAPES))),
}


def arrays_of(rank, dtypes):
    import cupy

    return [cupy.asarray((np.arange(np.prod(shape, dtype=int)) % 11 + rank + n)
                         .reshape(shape).astype(dtype))
            for n, (shape, dtype) in enumerate(zip(SHAPES, itertools.cycle(dtypes)))]


@each_case('owners, dtypes, grad_dtype, batched', itertools.product(
    OWNERS, [['f4'], ['f2'], ['f2', 'f4', 'f8']], [None, 'float16', 'float64'], [True, False]))
def test_mean_for_owners_and_copies(owners, dtypes, grad_dtype, batched):
    comm = chainermn.create_communicator(
        'pure_nccl', allreduce_grad_dtype=grad_dtype, batched_copy=batched)
    transport, owners = comm._context.transport, OWNERS[owners]
    arrays = arrays_of(RANK, dtypes)
    expected = [np.mean([x.get().astype('d') for x in each], 0)
                for each in zip(*(arrays_of(rank, dtypes) for rank in range(SIZE)), strict=True)]
    transport.mean_for_owners(ArrayList.of(arrays), tuple(owners))
    for x, mean, owner in zip(arrays, expected, owners, strict=True):
        if owner == RANK:
            np.testing.assert_allclose(x.get(), mean, 2e-3)
        else:
            x[...] = -1
    transport.copy_arrays(ArrayList.of(arrays), tuple(owners))
    for x, mean in zip(arrays, expected, strict=True):
        np.testing.assert_allclose(x.get(), mean, 2e-3)
    for x in arrays:
        assert len({*comm.allgather_obj(x.get().tobytes())}) == 1
    comm.finalize()


def test_copies_of_integers_and_of_views():
    import cupy

    comm = chainermn.create_communicator('pure_nccl')
    whole = cupy.full((2, SIZE * 4), RANK, 'i8')
    arrays = [whole[:, 4 * rank:4 * rank + 4] for rank in range(SIZE)]
    arrays += [cupy.full(3, RANK, 'i1') for _ in range(SIZE)]
    comm._context.transport.copy_arrays(ArrayList.of(arrays), (*range(SIZE),) * 2)
    for owner, x in zip([*range(SIZE)] * 2, arrays, strict=True):
        assert (x == owner).all()
    comm.finalize()

