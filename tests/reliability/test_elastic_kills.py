"""A few kills of elastic_kills.py."""
import importlib.util
import pathlib

import pytest
import virtual_hosts

PATH = pathlib.Path(__file__).with_name('elastic_kills.py')


@pytest.mark.full
@pytest.mark.limit(500)
@pytest.mark.mpi_skip
def test_no_sample_is_lost():
    if reason := virtual_hosts.why_not():
        pytest.skip(reason)
    spec = importlib.util.spec_from_file_location('elastic_kills', PATH)
    kills = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kills)
    counts = kills.run(kills=3, jobs=1, seed=1)
    assert counts['kills'] == 3
