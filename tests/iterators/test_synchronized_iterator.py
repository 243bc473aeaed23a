"""All ranks draw the same order from one seed."""

import chainer
import numpy as np
import pytest
from shared_fixtures import communicators

from chainermn.iterators import create_synchronized_iterator

N = 12

comm = communicators('naive', 'version7')


def test_all_ranks_draw_as_many_random_numbers(comm):
    np.random.seed(7)
    create_synchronized_iterator(chainer.iterators.SerialIterator(list(range(N)), N), comm)
    following = comm.allgather_obj(np.random.rand(3).tolist())
    np.random.seed(7)  # what ChainerMN 7 draws on rank 0
    np.random.permutation(N)
    np.random.randint(0, 2**32 - 1)
    assert following == [np.random.rand(3).tolist()] * comm.size


def test_it_starts_from_the_first_batch(comm):
    actual = chainer.iterators.SerialIterator(list(range(N)), 4)
    next(actual)
    iterator = create_synchronized_iterator(actual, comm)
    assert iterator.current_position == 0 and iterator.epoch == 0
    assert [iterator.next() for _ in range(3)] and iterator.is_new_epoch


def test_attributes_are_written_to_the_actual_iterator(comm):
    actual = chainer.iterators.SerialIterator(list(range(N)), 4)
    iterator = create_synchronized_iterator(actual, comm)
    iterator.batch_size = 5
    assert actual.batch_size == 5 and len(next(iter(iterator))) == 5


def test_no_order_sampler_on_one_rank_raises_on_all_ranks(comm):
    actual = chainer.iterators.SerialIterator(list(range(N)), 4)
    if comm.rank == comm.size - 1:
        actual = iter([])
    with pytest.raises(ValueError, match='has no order_sampler'):
        create_synchronized_iterator(actual, comm)
