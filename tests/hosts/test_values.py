"""Operations give the same results on several hosts as in one process."""

import pathlib
import sys

import pytest
from time_limits import seconds
from virtual_hosts import Hosts

pytestmark = [pytest.mark.full, pytest.mark.mpi_skip, pytest.mark.limit(120)]

HERE = pathlib.Path(__file__).parent
CONTRACT = [*sorted(HERE.parent.glob('communicators/test_contract*.py')),
            HERE.parent / 'laws' / 'test_collectives.py']


@pytest.mark.parametrize('ranks', [[2, 1], [2, 2], [1, 1, 1], [2, 2, 2]], ids=str)
def test_means(ranks):
    with Hosts(ranks) as hosts:
        done = hosts.run([sys.executable, '-W', 'ignore', HERE / 'means.py', *map(str, ranks)],
                         timeout=seconds(100))
    assert done.returncode == 0, done.stdout
    for n, ranks_of_host in enumerate(ranks):
        assert done.stdout.count(f'all right on node{n}') == ranks_of_host, done.stdout


@pytest.mark.limit(1300)
@pytest.mark.parametrize('ranks', [[2, 2], [3, 1], [1, 1, 1]], ids=str)
def test_contract(ranks):
    with Hosts(ranks) as hosts:
        done = hosts.run([sys.executable, '-m', 'pytest', '-p', 'no:cacheprovider', '-q',
                          '--with-mpi', *map(str, CONTRACT)], timeout=seconds(1200))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize('netmod', ['ucx', 'ofi'])
def test_receive_from_any_source(netmod):
    """Also if the message of another host is already there."""
    with Hosts([1, 1]) as hosts:
        done = hosts.run([sys.executable, '-W', 'ignore', HERE / 'any_source.py'],
                         timeout=seconds(20), env={'MPIR_CVAR_CH4_NETMOD': netmod})
    assert done.stdout == 'received object\n'

