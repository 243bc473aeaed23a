"""The consistency check: equal signatures pass, others raise on all ranks."""

import numpy as np
import pytest
from mpi4py import MPI

from chainermn._consistency.check import ConsistencyCheck
from chainermn._signature import pack

WORLD = MPI.COMM_WORLD


@pytest.fixture(scope='module')
def check():
    return ConsistencyCheck(WORLD.Dup())


def test_same(check, same_error):
    check.same(pack('barrier'))
    if WORLD.size > 1:
        same_error(check.same, pack('barrier' if WORLD.rank else 'split'))
    check.same(pack('barrier'))


def test_properties_that_may_differ(check):
    """The device, and for gather the shapes."""
    check.same(pack('allreduce', (2,), np.dtype('f4'), op='sum', device=WORLD.rank == 0))
    signatures = check.exchange(pack('gather', (WORLD.rank,), np.dtype('f4'), root=0))
    assert [signature.shape for signature in signatures] == [(rank,) for rank in range(WORLD.size)]
    signatures = check.exchange(pack('bcast', root=0) if WORLD.rank
                                 else pack('bcast', (3,), np.dtype('f2'), root=0))
    assert signatures[0].shape == (3,)


def test_exchange(check, same_error):
    if WORLD.size > 1:
        dtype = np.dtype('f4' if WORLD.rank else 'f8')
        same_error(check.exchange, pack('allgather', (2,), dtype))
    assert len(check.exchange(pack('allgather', (2,), np.dtype('f4')))) == WORLD.size


def test_same_and_exchange_mismatch(check, same_error):
    """Both kinds of exchange detect each other."""
    if WORLD.size > 1:
        call = check.exchange if WORLD.rank == 0 else check.same
        same_error(call, pack('allgather' if WORLD.rank == 0 else 'barrier'))
    check.same(pack('barrier'))


def test_numbers(check, same_error):
    assert check.numbers(pack('gather_obj', root=0, number=5 * WORLD.rank)) == [
        5 * rank for rank in range(WORLD.size)]
    if WORLD.size > 1:
        same_error(check.numbers, pack('gather_obj', root=int(WORLD.rank > 0)))
        call = check.numbers if WORLD.rank == 0 else check.same
        same_error(call, pack('gather_obj' if WORLD.rank == 0 else 'barrier'))
        with pytest.raises(LookupError):
            if WORLD.rank == 1:
                check.refuse('operation', LookupError('why'))
            check.numbers(pack('gather_obj', root=0))
    check.same(pack('barrier'))


def test_refuse(check, same_error):
    def call(odd):
        if WORLD.rank == odd:
            check.refuse('operation', LookupError('why'))
        check.same(pack('barrier'))

    for odd in range(WORLD.size):
        error = same_error(call, odd, failed=odd)
        assert type(error) is LookupError
        if WORLD.rank == odd and WORLD.size > 1:
            assert type(error.__cause__) is LookupError  # with its own traceback
    check.same(pack('barrier'))
