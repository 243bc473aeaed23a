"""An error of one rank is raised on all ranks, and printed once."""
import pytest

from chainermn._operations import common_error
from chainermn._operations.on_all_ranks import (
    check_equal,
    on_all_ranks,
    raise_on_all_ranks,
    raise_together,
)
from chainermn.communicators import create_communicator


def test_an_error_of_one_rank_is_raised_on_all():
    comm = create_communicator('naive')
    with pytest.raises(ZeroDivisionError, match='on purpose'):
        with raise_on_all_ranks(comm, 'a test'):
            if comm.rank == comm.size - 1:
                raise ZeroDivisionError('on purpose')
        comm.barrier()


def test_an_error_of_a_part_of_the_ranks_is_raised_on_all():
    """A collective of other ranks raised it: an error of all of those, but not of all here."""
    comm = create_communicator('naive')
    part = comm.split(comm.rank == 0, 0)
    with pytest.raises(ZeroDivisionError, match='on purpose'):
        with raise_together(comm, 'a test'):
            if comm.rank == 0:
                part.refuse('a test', ZeroDivisionError('on purpose'))
        comm.barrier()  # which raises it on the other ranks
    assert comm.allgather_obj(comm.rank) == [*range(comm.size)]
    part.finalize()


@pytest.mark.parametrize('wraps', [False, True])
def test_an_error_of_a_collective_in_the_block(wraps):
    """All ranks have raised it, or raise another one because of it."""
    comm = create_communicator('naive')
    with pytest.raises((ZeroDivisionError, RuntimeError)), raise_together(comm, 'a test'):
        try:
            if comm.rank == comm.size - 1:
                raise ZeroDivisionError('on purpose')
            comm.bcast_obj(comm.rank)
        except Exception as error:
            if not wraps or comm.rank == comm.size - 1:
                raise
            raise RuntimeError('wrapped') from error
    assert comm.allgather_obj(comm.rank) == [*range(comm.size)]


def test_rank_0_prints_an_error_of_all_ranks():
    comm = create_communicator('naive')
    error = ValueError('on purpose')
    assert not common_error.is_common(error) and common_error.is_printed_here(error)
    assert on_all_ranks(comm, error) is error
    assert common_error.is_common(error)
    assert common_error.is_printed_here(error) == (comm.rank == 0)


def test_equal_values():
    check_equal(create_communicator('naive'), ['a'] * 3, 'they differ', 'Pass the same.')


def test_values_that_differ_are_one_error_with_the_values_of_all_ranks():
    comm = create_communicator('naive')
    with pytest.raises(ValueError) as caught:
        check_equal(comm, ['a', 'b', 'a', 'a'], 'they differ', 'Pass the same.')
    assert str(caught.value) == 'they differ\n  ranks 0, 2-3: a\n  rank 1: b\nPass the same.'
    assert common_error.is_common(caught.value)
    assert common_error.is_printed_here(caught.value) == (comm.rank == 0)
