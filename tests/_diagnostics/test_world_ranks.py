"""The ranks of a communicator are a tuple that is small when it is pickled."""

import pickle

import pytest

from chainermn._diagnostics.world_ranks import WorldRanks

pytestmark = pytest.mark.mpi_skip

RANKS = [(), (5,), (0, 1, 2), (2, 1, 0), (0, 8, 16, 24), (3, 1, 2), (0, 1, 5, 6, 7, 20),
         (*range(500), *range(501, 1024)), (7, 7)]


@pytest.mark.parametrize('ranks', RANKS, ids=str)
def test_it_is_the_tuple(ranks):
    made = WorldRanks.of(ranks)
    assert made == ranks and hash(made) == hash(ranks) and {ranks: 1}[made] == 1
    assert isinstance(made, tuple) and made is WorldRanks.of(list(ranks))
    assert pickle.loads(pickle.dumps(made)) is made


@pytest.mark.parametrize('ranks', [range(4096), range(0, 4096, 8), range(4095, -1, -1),
                                   [*range(500), *range(501, 4096)]])
def test_ranges_are_small(ranks):
    assert len(pickle.dumps(WorldRanks.of(ranks))) < 120
