"""These tests run in one process, if there can be hosts."""

import pytest
import virtual_hosts


@pytest.fixture(autouse=True, scope='session')
def _hosts_are_possible() -> None:
    if reason := virtual_hosts.why_not():
        pytest.skip(reason)
