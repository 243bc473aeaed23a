"""The consistency check: equal signatures pass, others raise on all ranks."""

import traceback

import numpy as np
import pytest
from mpi4py import MPI

from chainermn._consistency.consistency_check import ConsistencyCheck
from chainermn._operations import common_error
from chainermn._operations.call_signature import pack, unpack
from chainermn._operations.table import END

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
F4 = np.dtype('f4')


@pytest.fixture(scope='module')
def check():
    return ConsistencyCheck(WORLD.Dup())


def test_properties_that_may_differ(check):
    """The device, the updates, and for gather the shapes."""
    signature = pack('allreduce', (1,), F4, op='sum', device=RANK == 0)
    assert check.same(signature) == (SIZE == 1)
    assert (check.gather_equal(signature, bytes(4)) is None) == (SIZE > 1)
    updates = [pack('multi_node_mean_grad', number=7, update=update) for update in (0, 3)]
    assert check.same(updates[RANK == 0]) == (SIZE == 1)
    assert check.same(updates[1])
    calls = [unpack(message) for message in check.gather(
        pack('gather', (RANK,), F4, root=0, device=RANK == 0))]
    assert [call.shape for call in calls] == [(rank,) for rank in range(SIZE)]
    assert [call.device for call in calls] == [rank == 0 for rank in range(SIZE)]
    root = SIZE - 1
    message = check.bcast(pack('bcast', (3,), np.dtype('f2'), root=root) if root == RANK else
                          pack('bcast', root=root), root)
    assert unpack(message).shape == (3,)


def test_refuse(check, same_error):
    def fail():
        raise LookupError('why')

    def call(odd):
        if odd == RANK:
            try:
                fail()
            except LookupError as error:
                check.refuse('operation', error)
        check.same(pack('barrier'))

    for odd in range(SIZE):
        error = same_error(call, odd, failed=odd)
        assert type(error) is LookupError
        if odd == RANK:  # one error, with the frames of the original one
            assert error.__cause__ is None and (error.__suppress_context__ or SIZE == 1)
            assert traceback.extract_tb(error.__traceback__)[-1].name == 'fail'
        if SIZE > 1:
            assert common_error.is_printed_here(error) == (odd == RANK)
    check.same(pack('barrier'))


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
