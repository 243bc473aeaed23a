"""All ranks see the batches and the progress of one rank's iterator."""
import copy
import io

import chainer
import numpy as np
import pytest
from shared_fixtures import communicators

import chainermn.datasets
from chainermn.iterators import create_multi_node_iterator

PROGRESS = ('epoch', 'is_new_epoch', 'epoch_detail', 'previous_epoch_detail', 'current_position')
N = 10

comm = communicators('naive', 'version7')


@pytest.fixture(params=['first', 'last'])
def root(request, comm):
    return 0 if request.param == 'first' else comm.size - 1


def serial(dataset, **kwargs):
    return chainer.iterators.SerialIterator(dataset, 3, **kwargs)


def make(comm, root, dataset, **kwargs):
    """The dataset is read on the root only."""
    if comm.rank != root:
        dataset = chainermn.datasets.create_empty_dataset(dataset)
    return create_multi_node_iterator(serial(dataset, **kwargs), comm, root)


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
