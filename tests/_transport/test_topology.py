"""Intra and inter ranks."""

import json
import os

import pytest
from jobs import run_on_hosts
from mpi4py import MPI

from chainermn._process import runtime
from chainermn._transport import topology
from chainermn._transport.topology import Place

pytestmark = pytest.mark.every_size


@pytest.mark.parametrize('hosts, expected', [
    ('a', [(0, 1, 0, 1)]),
    ('aaa', [(0, 3, 0, 1), (1, 3, 0, 1), (2, 3, 0, 1)]),
    ('ba', [(0, 1, 0, 2), (0, 1, 1, 2)]),
    ('babcab', [(0, 3, 0, 3), (0, 2, 1, 3), (1, 3, 0, 3), (0, 1, 2, 3), (1, 2, 1, 3),
                (2, 3, 0, 3)]),
])
def test_ranks(hosts, expected):
    places = [Place(host, 1) for host in hosts]
    assert [topology.of(rank, places)[:4] for rank in range(len(hosts))] == expected


def test_a_process_that_shares_cores_once_always_does():
    alone, oversubscribed = (topology.of(0, [Place('a', cores)] * 2) for cores in (0b11, 0b1))
    with runtime.replaced():
        assert [*map(topology.note_oversubscription, [alone, oversubscribed, alone])] == [
            False, True, True]


def test_nodes():
    found = topology.of(1, [Place(host, 0b1111) for host in 'babcab'])
    assert (found.nodes, found.smallest_node) == ((0, 1, 0, 2, 1, 0), 1)


@pytest.mark.parametrize('places, is_oversubscribed', [
    ([('a', 0b11), ('a', 0b11)], False),
    ([('a', 0b01), ('a', 0b10)], False),
    ([('a', 0b10), ('a', 0b10)], True),
    ([('a', 0b11), ('b', 0b1), ('b', 0b1)], True),
    ([('a', 1 << 200), ('a', 1 << 100)], False),
])
def test_oversubscribed_nodes(places, is_oversubscribed):
    found = topology.of(0, [Place(*place) for place in places])
    assert found.is_oversubscribed == is_oversubscribed


def test_discover():
    mpi_comm = MPI.COMM_WORLD
    found = topology.discover(mpi_comm)
    assert found[:5] == (mpi_comm.rank, mpi_comm.size, 0, 1, (0,) * mpi_comm.size)
    assert found.is_oversubscribed == (len(os.sched_getaffinity(0)) < mpi_comm.size)


PROGRAM = """
import json
import chainermn
comm = chainermn.create_communicator('naive')
pair = comm.split(comm.rank // 2, 0)
places = comm.gather_obj([[c.intra_rank, c.intra_size, c.inter_rank, c.inter_size]
                          for c in (comm, pair)])
if comm.rank == 0:
    print(json.dumps(places))
"""


@pytest.mark.slow
@pytest.mark.mpi_skip
def test_ranks_on_two_nodes(tmp_path):
    result = run_on_hosts(tmp_path, PROGRAM, ('node-b', 'node-a', 'node-b', 'node-a'))
    assert result.returncode == 0, result.stderr
    complete, pairs = zip(*json.loads(result.stdout), strict=True)
    assert list(complete) == [[0, 2, 0, 2], [0, 2, 1, 2], [1, 2, 0, 2], [1, 2, 1, 2]]
    # Each pair has one rank on each node.
    assert list(pairs) == [[0, 1, 0, 2], [0, 1, 1, 2]] * 2
