"""A few kills of kills.py; ``tox -e full`` runs 500."""
import pytest
from reliability import kills


@pytest.mark.slow
@pytest.mark.limit(180)
@pytest.mark.mpi_skip
def test_complete_saves_survive_kills():
    counts = kills.run(kills=2, jobs=1, seed=1, steps=100)
    assert counts['kills'] >= 2
