"""A few kills of kills.py; ``tox -e full`` runs 500."""
import importlib.util
import pathlib

import pytest

PATH = pathlib.Path(__file__).with_name('kills.py')


@pytest.mark.slow
@pytest.mark.limit(180)
@pytest.mark.mpi_skip
def test_complete_saves_survive_kills():
    spec = importlib.util.spec_from_file_location('kills', PATH)
    kills = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kills)
    counts = kills.run(kills=2, jobs=1, seed=1, steps=100)
    assert counts['kills'] >= 2
