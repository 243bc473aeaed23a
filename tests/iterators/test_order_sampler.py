"""Each sample is used once in each epoch, by one rank, also if the number of ranks changes."""

import itertools

import chainer
import numpy as np
import pytest
from shared_fixtures import communicators, raises_on_all

from chainermn.iterators import MultiNodeOrderSampler

N, BATCH = 37, 2

comm = communicators('naive', 'version7')


def iterator_of(comm, n=N, kind=chainer.iterators.SerialIterator, **options):
    return kind(list(range(n)), BATCH, order_sampler=MultiNodeOrderSampler(n, comm, **options))


def epoch(iterator):
    """The samples that this rank uses until the epoch ends."""
    samples = []
    number = iterator.epoch
    while iterator.epoch == number:
        batch = next(iterator)
        samples += batch[:len(batch) - iterator.current_position * iterator.is_new_epoch]
    return samples


@pytest.mark.parametrize('kind', [
    chainer.iterators.SerialIterator, chainer.iterators.MultithreadIterator])
@pytest.mark.parametrize('even', [True, False], ids=['even', 'uneven'])
@pytest.mark.parametrize('shuffle', [True, False], ids=['shuffled', 'in order'])
def test_each_sample_is_used_once_in_an_epoch(comm, kind, shuffle, even):
    iterator = iterator_of(comm, kind=kind, shuffle=shuffle, even=even)
    first, *orders = sampled = [iterator.order_sampler._order(n) for n in range(3)]
    for mine in sampled:
        by_rank = comm.allgather_obj(mine.tolist())
        samples = [*itertools.chain(*by_rank)]
        repeated = -N % comm.size if even else 0
        assert sorted(set(samples)) == list(range(N)) and len(samples) == N + repeated
        lengths = {len(each) for each in by_rank}
        assert lengths == {len(mine)} if even else max(lengths) - min(lengths) <= 1
    assert any((order != first).any() for order in orders) == shuffle
    length = len(first)
    found = [next(iterator) for _ in range(2 * length)]
    if hasattr(iterator, 'finalize'):
        iterator.finalize()
    assert [*itertools.chain(*found)][:3 * length] == np.concatenate(sampled).tolist()


def test_the_seed_makes_the_order(comm):
    orders = [iterator_of(comm, seed=seed).order_sampler._order(3).tolist() for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize('n_epochs', [0, 2])
def test_a_saved_iterator_continues(comm, tmp_path, n_epochs):
    iterator = iterator_of(comm)
    for _ in range(n_epochs):
        epoch(iterator)
    next(iterator)
    path = str(tmp_path / f'{comm.rank}')
    chainer.serializers.save_npz(path, iterator)
    expected = [next(iterator) for _ in range(60)]
    other = iterator_of(comm)
    chainer.serializers.load_npz(path, other)
    assert [next(other) for _ in range(60)] == expected
    iterator.reset()
    assert [next(iterator) for _ in range(2)] == [next(each) for each in [iterator_of(comm)] * 2]


def test_an_order_of_another_seed_is_an_error(comm, tmp_path, monkeypatch):
    monkeypatch.setattr('chainermn.iterators.order_sampler._MAX_EPOCHS', 20)
    path = str(tmp_path / f'{comm.rank}')
    chainer.serializers.save_npz(path, iterator_of(comm, seed=1))
    other = iterator_of(comm, seed=2)
    chainer.serializers.load_npz(path, other)
    with pytest.raises(ValueError, match='that of another order sampler'):
        epoch(other)


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize('n, seed, error', [
    (0, 0, 'has 0 samples, fewer than'), ('x', 0, 'interpreted as an integer'),
    (N, -1, 'seed must not be negative')])
def test_an_invalid_argument_on_one_rank_is_an_error_on_all(comm, n, seed, error):
    is_last = comm.rank == comm.size - 1
    with raises_on_all((TypeError, ValueError), match=error):
        MultiNodeOrderSampler(n if is_last else N, comm, seed if is_last else 0)


@pytest.mark.mpi(min_size=2)
def test_different_arguments(comm):
    with raises_on_all(ValueError, match='same dataset_size, seed, shuffle and even'):
        MultiNodeOrderSampler(N, comm, seed=comm.rank)
