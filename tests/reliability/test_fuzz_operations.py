"""Some sequences of fuzz_operations.py; ``tox -e full`` plays thousands."""
import contextlib
import importlib
import pathlib
import sys

import pytest
from hypothesis import strategies as st
from mpi4py import MPI

from chainermn._operations import table

pytestmark = [
    pytest.mark.every_size,
    pytest.mark.skipif(MPI.COMM_WORLD.size not in (2, 3), reason='plays on 2 or 3 ranks'),
]


@pytest.fixture
def fuzz_operations(monkeypatch):
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent))
    before = set(sys.modules)
    yield importlib.import_module('fuzz_operations')
    for name in set(sys.modules) - before:
        if name.startswith('fuzz_'):
            del sys.modules[name]


def test_every_collective_is_played(fuzz_operations):
    played = importlib.import_module('fuzz_model')._VALUES.keys()
    assert played == table.collectives() - {'finalize'}  # which ends a sequence


def test_outcomes_are_correct(fuzz_operations):
    counts = fuzz_operations.fuzz(50, seed=MPI.COMM_WORLD.size, limit=None)
    assert counts['sequences'] == 50
    assert counts['values'] > 50 < counts['errors']


def test_a_wrong_outcome_is_found(fuzz_operations, monkeypatch):
    """On one rank, of one operation."""
    from chainermn.communicators.naive_communicator import NaiveCommunicator

    allgather = NaiveCommunicator.allgather

    def wrong(self, x):
        xs = allgather(self, x)
        if self.rank == 1:
            xs[0].flat[0] += 1
        return xs

    monkeypatch.setattr(NaiveCommunicator, 'allgather', wrong)
    size = MPI.COMM_WORLD.size
    array = importlib.import_module('fuzz_values').Array('plain', 'float32', (3,))
    calls = (importlib.import_module('fuzz_errors').Call('allgather', {'x': array}),) * size
    steps = [importlib.import_module('fuzz_calls').Collective(calls)]
    monkeypatch.setattr(fuzz_operations, 'sequences', lambda size: st.just(steps))
    with contextlib.nullcontext() if MPI.COMM_WORLD.rank else pytest.raises(
            AssertionError, match=r"naive, step 0: rank 1: Call.operation='allgather'"):
        fuzz_operations.fuzz(1, seed=0, limit=None)
