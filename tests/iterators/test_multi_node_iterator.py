"""All ranks see the batches and the progress of one rank's iterator."""
import copy
import io
import itertools

import chainer
import numpy as np
import pytest
from equal_values import assert_same
from shared_fixtures import communicators

import chainermn.datasets
from chainermn.iterators import create_multi_node_iterator

# MultiprocessIterator forks while other threads run, of which Python warns.
pytestmark = pytest.mark.filterwarnings(
    'ignore:.* multi-threaded, use of fork:DeprecationWarning')

PROGRESS = ('epoch', 'is_new_epoch', 'epoch_detail', 'previous_epoch_detail', 'current_position')
N = 10

comm = communicators('naive', 'version7')


@pytest.fixture(params=['first', 'last'])
def root(request, comm):
    return 0 if request.param == 'first' else comm.size - 1


def serial(dataset, **kwargs):
    return chainer.iterators.SerialIterator(dataset, 3, **kwargs)


def multithread(dataset, **kwargs):
    return chainer.iterators.MultithreadIterator(dataset, 3, n_threads=2, **kwargs)


def multiprocess(dataset, **kwargs):
    return chainer.iterators.MultiprocessIterator(dataset, 3, n_processes=2, **kwargs)


def make(comm, root, dataset, kind=serial, **kwargs):
    """The data set is read on the root only."""
    if comm.rank != root:
        dataset = chainermn.datasets.create_empty_dataset(dataset)
        kind = serial
    return create_multi_node_iterator(kind(dataset, **kwargs), comm, root)


def test_copy_starts_apart(comm, root):
    iterator = make(comm, root, list(range(N)), repeat=False, shuffle=False)
    other = copy.copy(iterator)
    assert next(iterator) == next(other) == [0, 1, 2]


def saved(iterator):
    """What it saves, as it is in a file."""
    file = io.BytesIO()
    saver = chainer.serializers.DictionarySerializer()
    iterator.serialize(saver)
    np.savez(file, **saver.target)
    file.seek(0)
    return np.load(file, allow_pickle=True)  # for None


def load(iterator, arrays):
    iterator.serialize(chainer.serializers.NpzDeserializer(arrays))


@pytest.mark.sample(5)
@pytest.mark.parametrize('n_batches', [0, 2, 4, 7], ids='after {} batches'.format)
@pytest.mark.parametrize('kind, options', [
    *itertools.product([serial, multithread, multiprocess], [{}, {'repeat': False}]),
    *itertools.product([serial, multithread, multiprocess], [{'shuffle': False}]),
], ids=lambda value: getattr(value, '__name__', str(value)))
def test_every_rank_saves_what_one_process_can_load(comm, root, kind, options, n_batches):
    np.random.seed(comm.rank)
    dataset = list(range(N))
    iterator = create_multi_node_iterator(
        kind(dataset if comm.rank == root else chainermn.datasets.create_empty_dataset(dataset),
             **options), comm, root)
    for _ in itertools.islice(iterator, n_batches):
        pass
    arrays = saved(iterator)
    # The orders that it has drawn in advance are only of use to the root.
    everyone = comm.allgather_obj({name: arrays[name] for name in arrays if name != 'next_orders'})
    for other in everyone:
        assert_same(other, everyone[root])
    plain = kind(dataset, **options)
    load(plain, arrays)
    for attribute in PROGRESS:
        assert getattr(plain, attribute) == getattr(iterator, attribute), attribute
    # The rest of the epoch, without the first examples of the next one, whose order is drawn.
    n_left = 0 if plain.epoch and 'repeat' in options else N - plain.current_position
    ours, plains = ([x for batch in itertools.islice(each, -(-n_left // 3)) for x in batch]
                    for each in (iterator, plain))
    assert len(ours) >= n_left
    assert ours[:n_left] == plains[:n_left]
    plain.finalize()
    iterator.finalize()


def test_loading_follows_the_master(comm, root):
    """Whatever the snapshots of the other ranks hold, and if it is that of one process."""
    np.random.seed(comm.rank)
    dataset = list(range(N))
    plain = serial(dataset)
    for _ in range(5 if comm.rank == root else comm.rank):
        plain.next()
    iterator = make(comm, root, dataset)
    load(iterator, saved(plain))
    progress = [getattr(iterator, attribute) for attribute in PROGRESS]
    assert progress[:2] == [1, False]
    assert comm.allgather_obj(progress) == [progress] * comm.size
    arrays = saved(iterator)
    order = comm.bcast_obj(plain._state.order, root=root)
    np.testing.assert_array_equal(arrays['order'], order)
    assert iterator.next() == order[5:8].tolist()


def test_an_iterator_without_an_order(comm, root):
    """Only what it has is saved."""
    class Endless(chainer.dataset.Iterator):
        epoch, is_new_epoch = 2, True

        def __next__(self):
            return [0]

        def serialize(self, serializer):
            self.epoch = serializer('epoch', self.epoch)

    iterator = create_multi_node_iterator(Endless(), comm, root)
    assert iterator.next() == [0]
    assert sorted(saved(iterator)) == (
        ['epoch'] if comm.rank == root else ['epoch', 'is_new_epoch'])


def test_large_numbers_are_exact(comm, root):
    """Positions do not pass through float32, nor do batches."""
    class Far(chainer.dataset.Iterator):
        current_position = 2**24 + 1 if comm.rank == root else 0
        epoch = 2**53 + 1 if comm.rank == root else 0

        def __next__(self):
            self.current_position += 1
            return [2**62 + 1]

    iterator = create_multi_node_iterator(Far(), comm, root)
    assert (iterator.current_position, iterator.epoch) == (2**24 + 1, 2**53 + 1)
    assert iterator.next() == [2**62 + 1]
    assert iterator.current_position == 2**24 + 2
    assert not hasattr(iterator, 'epoch_detail')


def test_an_error_of_the_root_is_raised_everywhere(comm, root):
    class Broken(chainer.dataset.DatasetMixin):
        def __len__(self):
            return N

        def get_example(self, i):
            raise OSError(f'cannot read example {i}')

    iterator = make(comm, root, Broken(), shuffle=False)
    with pytest.raises(OSError, match='cannot read example 0'):
        next(iterator)
    comm.barrier()


@pytest.mark.compares_calls
@pytest.mark.mpi(min_size=2)
def test_different_roots_are_rejected(comm):
    with pytest.raises(ValueError, match='roots differ'):
        create_multi_node_iterator(serial([1]), comm, 1 if comm.rank == 0 else 0)


def test_not_a_communicator():
    with pytest.raises(TypeError, match='communicator'):
        create_multi_node_iterator(serial([1]), None)
