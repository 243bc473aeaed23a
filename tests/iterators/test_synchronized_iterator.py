"""All ranks draw the same order from one seed."""
import itertools

import chainer
import numpy as np
import pytest
from shared_fixtures import communicators

from chainermn.iterators import create_synchronized_iterator

N = 12

comm = communicators('naive', 'version7')


@pytest.mark.parametrize('kind', ['SerialIterator', 'MultithreadIterator'])
def test_same_order_over_epochs(comm, kind):
    np.random.seed(comm.rank)
    actual = getattr(chainer.iterators, kind)(list(range(N)), 4, shuffle=True)
    iterator = create_synchronized_iterator(actual, comm)
    seen = [next(iterator) for _ in range(9)]
    assert comm.allgather_obj(seen) == [seen] * comm.size
    epochs = [list(itertools.chain(*seen[i:i + 3])) for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(N)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    iterator.finalize()


def test_the_seed_is_drawn_on_rank_0(comm):
    """The same seed of rank 0 gives the same order, whatever the others draw."""
    orders = []
    for others in (1, 2):
        np.random.seed(7 if comm.rank == 0 else others + comm.rank)
        iterator = create_synchronized_iterator(
            chainer.iterators.SerialIterator(list(range(N)), N), comm)
        orders.append(next(iterator))
    assert orders[0] == orders[1]


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
