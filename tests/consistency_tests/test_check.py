"""The agreement by itself: equal headers pass, different ones raise on all ranks."""

import numpy as np
import pytest
from mpi4py import MPI

from chainermn._consistency.check import Agreement
from chainermn._signature import pack

WORLD = MPI.COMM_WORLD


@pytest.fixture(scope='module')
def agreement():
    return Agreement(WORLD.Dup())


def test_same(agreement, same_error):
    agreement.same(pack('barrier'))
    if WORLD.size > 1:
        same_error(agreement.same, pack('barrier' if WORLD.rank else 'split'))
    agreement.same(pack('barrier'))


def test_what_need_not_be_equal(agreement):
    """Where the arrays are, and for gather their shapes."""
    agreement.same(pack('allreduce', (2,), np.dtype('f4'), op='sum', device=WORLD.rank == 0))
    headers = agreement.exchange(pack('gather', (WORLD.rank,), np.dtype('f4'), root=0))
    assert [header.shape for header in headers] == [(rank,) for rank in range(WORLD.size)]
    headers = agreement.exchange(pack('bcast', root=0) if WORLD.rank
                                 else pack('bcast', (3,), np.dtype('f2'), root=0))
    assert headers[0].shape == (3,)


def test_exchange(agreement, same_error):
    if WORLD.size > 1:
        dtype = np.dtype('f4' if WORLD.rank else 'f8')
        same_error(agreement.exchange, pack('allgather', (2,), dtype))
    assert len(agreement.exchange(pack('allgather', (2,), np.dtype('f4')))) == WORLD.size


def test_same_meets_exchange(agreement, same_error):
    """The two kinds of verbs find each other."""
    if WORLD.size > 1:
        call = agreement.exchange if WORLD.rank == 0 else agreement.same
        same_error(call, pack('allgather' if WORLD.rank == 0 else 'barrier'))
    agreement.same(pack('barrier'))


def test_numbers(agreement, same_error):
    assert agreement.numbers(pack('gather_obj', root=0, number=5 * WORLD.rank)) == [
        5 * rank for rank in range(WORLD.size)]
    if WORLD.size > 1:
        same_error(agreement.numbers, pack('gather_obj', root=int(WORLD.rank > 0)))
        call = agreement.numbers if WORLD.rank == 0 else agreement.same
        same_error(call, pack('gather_obj' if WORLD.rank == 0 else 'barrier'))
        with pytest.raises(LookupError):
            if WORLD.rank == 1:
                agreement.refuse('verb', LookupError('why'))
            agreement.numbers(pack('gather_obj', root=0))
    agreement.same(pack('barrier'))


def test_refuse(agreement, same_error):
    def call(odd):
        if WORLD.rank == odd:
            agreement.refuse('verb', LookupError('why'))
        agreement.same(pack('barrier'))

    for odd in range(WORLD.size):
        error = same_error(call, odd, refused=odd)
        assert type(error) is LookupError
        if WORLD.rank == odd and WORLD.size > 1:
            assert type(error.__cause__) is LookupError  # with its own traceback
    agreement.same(pack('barrier'))
