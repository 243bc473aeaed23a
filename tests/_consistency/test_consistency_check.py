"""The consistency check: identical signatures pass; others raise an error on all ranks."""


import pytest
from mpi4py import MPI

from chainermn._consistency.consistency_check import ConsistencyCheck
from chainermn._operations import common_error
from chainermn._operations.call_signature import pack
from chainermn._operations.table import END

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size


@pytest.fixture(scope='module')
def check():
    return ConsistencyCheck(WORLD.Dup())


@pytest.mark.parametrize('make', [
    lambda: ValueError('own class'), lambda: type('Own', (ValueError,), {})('own class')])
def test_the_cause_of_an_error_is_kept(check, same_error, make):
    def call():
        try:
            raise OSError('disk')
        except OSError as cause:
            try:
                raise make() from cause
            except ValueError as error:
                check.refuse('operation', error)

    error, seen = same_error(call, table=False), []
    while error is not None:
        seen.append(type(error).__name__)
        error = error.__cause__
    assert seen in (['ValueError', 'OSError'], ['ValueError', 'Own', 'OSError'], ['Own', 'OSError'])


@pytest.mark.mpi(min_size=2)
def test_the_first_rank_that_has_not_ended_prints_a_mismatch(check, same_error):
    error = same_error(check.same, pack('barrier' if RANK else END))
    assert common_error.is_printed_here(error) == (RANK == 1)

