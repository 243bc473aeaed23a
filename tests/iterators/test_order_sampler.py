"""Each sample is used once in each epoch, by one rank, also if the number of ranks changes."""


import chainer
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


def test_an_order_of_another_seed_is_an_error(comm, tmp_path, monkeypatch):
    monkeypatch.setattr('chainermn.iterators.order_sampler._MAX_EPOCHS', 20)
    path = str(tmp_path / f'{comm.rank}')
    chainer.serializers.save_npz(path, iterator_of(comm, seed=1))
    other = iterator_of(comm, seed=2)
    chainer.serializers.load_npz(path, other)
    with pytest.raises(ValueError, match='saved with a different order sampler'):
        epoch(other)


@pytest.mark.parametrize('n', [N - 2, N + 2])
def test_a_dataset_of_another_length(comm, n):
    sampler = MultiNodeOrderSampler(N, comm)
    with pytest.raises(ValueError, match=f'dataset_size of MultiNodeOrderSampler is {N}, but the '
                                         f'dataset of the iterator has {n} samples'):
        chainer.iterators.SerialIterator([*range(n)], BATCH, order_sampler=sampler)


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize('n, seed, error', [
    (0, 0, 'has 0 samples, but each of the'), ('x', 0, 'the number of samples, such as .* not str'),
    (N, -1, 'seed must not be negative')])
def test_an_invalid_argument_on_one_rank_is_an_error_on_all(comm, n, seed, error):
    is_last = comm.rank == comm.size - 1
    with raises_on_all((TypeError, ValueError), match=error):
        MultiNodeOrderSampler(n if is_last else N, comm, seed if is_last else 0)


@pytest.mark.mpi(min_size=2)
def test_different_arguments(comm):
    with raises_on_all(ValueError, match='same dataset_size, seed, shuffle and even'):
        MultiNodeOrderSampler(N, comm, seed=comm.rank)
