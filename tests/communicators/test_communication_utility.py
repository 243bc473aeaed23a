"""The old names of _communication_utility."""


import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn import nccl
from chainermn._transport import topology
from chainermn.communicators import _communication_utility

pytestmark = pytest.mark.every_size

WORLD = MPI.COMM_WORLD


def test_init_ranks():
    comm = chainermn.create_communicator('naive')
    assert _communication_utility.init_ranks(WORLD) == (
        comm.rank, comm.intra_rank, comm.intra_size, comm.inter_rank, comm.inter_size)
    comm.finalize()


def test_intra_and_inter_mpi_comm(monkeypatch):
    monkeypatch.setattr(topology.MPI, 'Get_processor_name', lambda: 'ab'[WORLD.rank % 2])
    rank, intra_rank, intra_size, inter_rank, inter_size = _communication_utility.init_ranks(WORLD)
    assert rank == WORLD.rank
    assert inter_size == min(WORLD.size, 2)
    intra = _communication_utility.init_intra_mpi_comm(WORLD, intra_rank, inter_rank)
    assert (intra.rank, intra.size) == (intra_rank, intra_size)
    assert intra.allgather(rank) == list(range(rank % 2, WORLD.size, 2))
    inter = _communication_utility.init_inter_mpi_comm(WORLD, intra_rank, inter_rank)
    assert inter.allgather(rank) == [
        r for r in (2 * intra_rank, 2 * intra_rank + 1) if r < WORLD.size]
    intra.Free()
    inter.Free()


@pytest.mark.parametrize('max_buf_len', [1, 2**28])
def test_chunked_bcast_obj(max_buf_len):
    root = WORLD.size - 1
    obj = {'x': np.arange(100000), 'y': [None, 'z']} if WORLD.rank == root else None
    received = _communication_utility.chunked_bcast_obj(obj, WORLD, max_buf_len, root)
    np.testing.assert_array_equal(received['x'], np.arange(100000))
    assert received['y'] == [None, 'z']


def test_inter_allreduce_gpu():
    class Buffer:
        def __init__(self, x):
            self.x = x

        def array(self, shape, offset=0, dtype=np.float32):
            return self.x[:shape[0]]

    class Stream:
        def synchronize(self):
            pass

    per_node = 3
    x = np.arange(per_node * WORLD.size, dtype='f4')
    a, b = Buffer(x.copy()), Buffer(x * 10 + 1000 * WORLD.rank)
    _communication_utility.inter_allreduce_gpu(
        WORLD, 8, a, b, x.nbytes, per_node, 4 * per_node, Stream())
    expected = x * 10 * WORLD.size + 1000 * sum(range(WORLD.size))
    np.testing.assert_allclose(b.x, expected / 8)


def test_nccl_type_id(monkeypatch):
    for number, name in enumerate(['NCCL_FLOAT16', 'NCCL_FLOAT32', 'NCCL_FLOAT64'], start=6):
        monkeypatch.setattr(nccl, name, number, raising=False)
    for dtype, number in [('f2', 6), (np.float32, 7), (np.dtype('f8'), 8)]:
        assert _communication_utility._get_nccl_type_id(np.dtype(dtype)) == number
    with pytest.raises(ValueError, match='float16, float32, float64, not int16'):
        _communication_utility._get_nccl_type_id(np.dtype('i2'))


@pytest.mark.parametrize('max_buf_len', [0, -1, _communication_utility.INT_MAX])
def test_invalid_max_buf_len(max_buf_len):
    with pytest.raises(AssertionError, match='max_buf_len must be from 1 to 2147483646'):
        _communication_utility.chunked_bcast_obj(1, WORLD, max_buf_len=max_buf_len)
