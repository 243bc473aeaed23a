"""The transport on MPI: small arrays share a message, and every array gets its own mean."""

import numpy as np
import pytest
from mpi4py import MPI

from chainermn._transport import owned_arrays, topology
from chainermn._transport.array_list import ArrayList
from chainermn._transport.base import Group
from chainermn._transport.mpi_transport import LARGE, MpiTransport

pytestmark = pytest.mark.every_size

WORLD = MPI.COMM_WORLD

#: Many small ones, one that is too large, an empty one, other dtypes in between, not contiguous.
SHAPES = [((3, 2), 'f'), ((), 'f'), ((5,), 'd'), ((LARGE,), 'f'), ((0,), 'f'), ((7,), 'e'),
          *[((1000,), 'f')] * 40, ((4, 3), 'F')]


class Counted(MpiTransport):
    """Counts messages."""

    count = 0

    def _packed_mean(self, group, targets):
        self.count += 1
        super()._packed_mean(group, targets)

    def _packed_bcast(self, group, root):
        self.count += 1
        super()._packed_bcast(group, root)


@pytest.fixture
def transport():
    mpi_comm = WORLD.Dup()
    yield Counted(Group(mpi_comm, mpi_comm, topology.discover(mpi_comm), lambda: None))
    mpi_comm.Free()


def arrays_of(rank):
    random = np.random.RandomState(rank)
    return [np.asarray(random.normal(0, 1, shape), 'f', order='F') if dtype == 'F' else
            np.asarray(random.normal(0, 1, shape)).astype(dtype) for shape, dtype in SHAPES]


def check_means(arrays):
    for array, *by_rank in zip(arrays, *map(arrays_of, range(WORLD.size)), strict=True):
        assert array.dtype == by_rank[0].dtype
        np.testing.assert_allclose(
            array.astype('d'), np.mean([x.astype('d') for x in by_rank], axis=0),
            rtol=2e-3 if array.dtype == np.float16 else 1e-5, atol=1e-6)


def test_mean_in_place(transport):
    arrays = arrays_of(WORLD.rank)
    transport.mean(ArrayList.of(arrays))
    check_means(arrays)
    # float32: the large one, and 160 KB of small ones in messages of 64 KB; float64; float16.
    assert transport.count == 1 + 3 + 2


def test_mean_into_other_arrays(transport):
    arrays, results = arrays_of(WORLD.rank), [np.full_like(x, 9) for x in arrays_of(0)]
    transport.mean(ArrayList.of(arrays), results)
    check_means(results)
    for array, before in zip(arrays, arrays_of(WORLD.rank), strict=True):
        np.testing.assert_array_equal(array, before)


def test_bcast(transport):
    root = WORLD.size - 1
    arrays = arrays_of(WORLD.rank)
    transport.bcast_arrays(ArrayList.of(arrays), root)
    for array, expected in zip(arrays, arrays_of(root), strict=True):
        np.testing.assert_array_equal(array, expected)
    assert transport.count == 1 + 3 + 2


def owners():
    """One for each array; if there are three ranks, the last one owns none."""
    return tuple(sorted(n % min(WORLD.size, 2) for n in range(len(SHAPES))))


def test_mean_for_owners(transport, monkeypatch):
    monkeypatch.setattr(owned_arrays, 'CHUNK', 1000 * 4 * WORLD.size)
    arrays = arrays_of(WORLD.rank)
    transport.mean_for_owners(ArrayList.of(arrays), owners())
    transport.copy_arrays(ArrayList.of(arrays), owners())
    check_means(arrays)


@pytest.mark.mpi(min_size=3)
def test_owners_on_nodes_with_several_ranks(transport):
    """MPI sums within the nodes first."""
    places = [topology.Place(f'node {rank // 2}', 1) for rank in range(WORLD.size)]
    transport.group.topology = topology.of(WORLD.rank, places)
    arrays = arrays_of(WORLD.rank)
    transport.mean_for_owners(ArrayList.of(arrays), owners())
    check_means(arrays)
    assert transport.count == 1 + 3 + 2
    transport.copy_arrays(ArrayList.of(arrays), owners())
    check_means(arrays)
    assert transport.count > 1 + 3 + 2


def test_a_transport_with_its_own_mean_and_bcast(transport):
    class Own(MpiTransport):
        calls = ()

        def mean(self, arrays, results=None):
            self.calls += 'mean',
            super().mean(arrays, results)

        def bcast_arrays(self, arrays, root=0):
            self.calls += root,
            super().bcast_arrays(arrays, root)

    own, arrays = Own(transport.group), arrays_of(WORLD.rank)
    own.mean_for_owners(ArrayList.of(arrays), owners())
    check_means(arrays)
    own.copy_arrays(ArrayList.of(arrays), owners())
    assert own.calls == ('mean', *range(min(WORLD.size, 2)))
