"""Some of the sequences of fuzz_verbs.py, which plays thousands in ``tox -e full``."""
import importlib
import pathlib
import sys

import pytest
from mpi4py import MPI

pytestmark = [
    pytest.mark.every_size,
    pytest.mark.skipif(MPI.COMM_WORLD.size not in (2, 3), reason='plays on 2 or 3 ranks'),
]


@pytest.fixture
def fuzz_verbs(monkeypatch):
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent))
    before = set(sys.modules)
    yield importlib.import_module('fuzz_verbs')
    for name in set(sys.modules) - before:
        if name.startswith('fuzz_'):
            del sys.modules[name]


def test_each_outcome_is_right_or_the_same_error_everywhere(fuzz_verbs):
    counts = fuzz_verbs.fuzz(50, seed=MPI.COMM_WORLD.size, limit=None)
    assert counts['sequences'] == 50
    assert counts['values'] > 50 < counts['errors']


def test_a_wrong_outcome_is_found(fuzz_verbs, monkeypatch):
    """On one rank, of one verb, for one dtype."""
    from chainermn.communicators.naive_communicator import NaiveCommunicator

    allgather = NaiveCommunicator.allgather

    def wrong(self, x):
        xs = allgather(self, x)
        if self.rank == 1 and xs[0].dtype == 'float32' and xs[0].size:
            xs[0].flat[0] += 1
        return xs

    monkeypatch.setattr(NaiveCommunicator, 'allgather', wrong)
    if MPI.COMM_WORLD.rank:
        fuzz_verbs.fuzz(100, seed=0, limit=None)
    else:
        with pytest.raises(AssertionError, match=r"naive, step 0: rank 1: Call.verb='allgather'"):
            fuzz_verbs.fuzz(100, seed=0, limit=None)
