"""A few kills of elastic_kills.py."""
import pytest
import virtual_hosts
from reliability import elastic_kills as kills


@pytest.mark.full
@pytest.mark.limit(500)
@pytest.mark.mpi_skip
def test_no_sample_is_lost():
    if reason := virtual_hosts.why_not():
        pytest.skip(reason)
    counts = kills.run(kills=3, jobs=1, seed=1)
    assert counts['kills'] == 3
