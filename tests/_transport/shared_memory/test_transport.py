"""Large host arrays are summed in shared memory by every operation."""

import numpy as np
import pytest

import chainermn
from chainermn._transport.mpi_transport import LARGE
from chainermn._transport.shared_memory import shared_sums

pytestmark = pytest.mark.every_size

DTYPES = ['float16', 'float32', 'float64']


@pytest.fixture(scope='module')
def flat():
    flat = chainermn.create_communicator('flat')
    yield flat
    flat.finalize()


@pytest.fixture
def sums(monkeypatch):
    """Count the sums in shared memory."""
    sums = []
    original = shared_sums.SharedMemory.sum

    def counted(self, arrays, *args, **kwargs):
        sums.append(len(arrays))
        return original(self, arrays, *args, **kwargs)

    monkeypatch.setattr(shared_sums.SharedMemory, 'sum', counted)
    return sums


def numbers(rank, dtype, shape=(LARGE // 4, 3)):
    """Small integers, whose sums are exact."""
    return np.random.RandomState(rank).randint(-8, 9, shape).astype(dtype)


def total(comm, dtype, shape=(LARGE // 4, 3)):
    return sum(numbers(rank, dtype, shape) for rank in range(comm.size))


@pytest.mark.parametrize('dtype', DTYPES)
def test_allreduce(flat, sums, dtype):
    x = numbers(flat.rank, dtype)
    np.testing.assert_array_equal(flat.allreduce(x), total(flat, dtype))
    np.testing.assert_array_equal(flat.allreduce(np.asfortranarray(x)), total(flat, dtype))
    np.testing.assert_array_equal(x, numbers(flat.rank, dtype))
    out = np.empty_like(x)
    assert flat.allreduce(x, out=out) is out
    np.testing.assert_array_equal(out, total(flat, dtype))
    assert flat.allreduce(x, out=x) is x
    np.testing.assert_array_equal(x, total(flat, dtype))
    assert sums == ([1] * 4 if flat.size > 1 else [])


@pytest.mark.parametrize('dtype', ['float16', 'complex128'])
def test_bcast(flat, monkeypatch, dtype):
    copies = []
    original = shared_sums.SharedMemory.copy
    monkeypatch.setattr(shared_sums.SharedMemory, 'copy', lambda self, arrays, owners: (
        copies.append(owners), original(self, arrays, owners))[1])
    for root in range(flat.size):
        x = numbers(root, dtype) if flat.rank == root else None
        y = flat.bcast(x, root)
        np.testing.assert_array_equal(y, numbers(root, dtype))
        assert y.flags.writeable and (x is None or y is x)
        y = flat.bcast(None if x is None else x[1:].T, root)  # not contiguous
        np.testing.assert_array_equal(y, numbers(root, dtype)[1:].T)
        small = flat.bcast(None if x is None else x[:2], root)
        np.testing.assert_array_equal(small, numbers(root, dtype)[:2])
    assert copies == ([(root,) for root in range(flat.size) for _ in range(2)]
                      if flat.size > 1 else [])


def test_carried_by_mpi(flat, sums):
    large = numbers(flat.rank, 'float32')
    flat.allreduce(large, 'max')
    flat.allreduce(large.astype(np.int32))
    flat.allreduce(large[:10])
    flat.allreduce_many([large[:10], large[:10]])
    flat.allreduce_many([large, large], 'prod')
    assert sums == []

