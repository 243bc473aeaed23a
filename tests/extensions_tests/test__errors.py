"""An error of one rank is raised on all ranks."""
import pytest

from chainermn._errors import raise_on_all_ranks
from chainermn.communicators import create_communicator


def test_an_error_of_one_rank_is_raised_on_all():
    comm = create_communicator('naive')
    with pytest.raises(ZeroDivisionError, match='on purpose'):
        with raise_on_all_ranks(comm, 'a test'):
            if comm.rank == comm.size - 1:
                raise ZeroDivisionError('on purpose')
        comm.barrier()
