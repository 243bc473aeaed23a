"""ShardedIterator with files, Chainer's objects and killed jobs; its order is in laws."""

import collections
import copy
import gc
import glob
import itertools
import os
import re
import threading
import traceback
import warnings

import chainer
import numpy as np
import pytest
from chainer.training import extensions
from killed_jobs import make_saver
from ranks_in_threads import Alone, on_ranks
from shared_fixtures import create

import chainermn
from chainermn._operations import common_error
from chainermn.datasets import write_shards
from chainermn.iterators import ShardedIterator, ShardError

pytestmark = pytest.mark.every_size


def check_once(counts, n):
    """Samples were taken once per epoch, and some of the current epoch once more."""
    complete = sum(counts.values()) // n
    assert min(counts[i] for i in range(n)) >= complete
    assert max(counts.values()) <= -(-sum(counts.values()) // n)


@pytest.mark.parametrize('size', [2, 4])
def test_a_rank_opens_its_part_of_a_window(size):
    """Besides its own shards, those that it shares with its neighbors."""
    opened = [set() for _ in range(size)]

    class Shard:
        def __init__(self, rank, number):
            self.rank, self.number = rank, number

        def __len__(self):
            return 400

        def __getitem__(self, i):
            opened[self.rank].add(self.number)
            return i

    iterators = on_ranks(size, lambda comm: ShardedIterator(
        [Shard(comm.rank, i) for i in range(16)], 64, comm, buffer=16, n_prefetch=0, repeat=False))
    for each in iterators:
        assert len([*each]) == 100 // size
    assert max(map(len, opened)) <= 16 // size + 4


# --- with real ranks, files, and Chainer's objects -----------------------------------------------


@pytest.fixture(scope='module')
def comm():
    return create('naive')


def write(comm, n=100, samples_per_shard=7, prefix='train'):
    """Each rank writes its share of n samples: a row, and its number."""
    mine = [(np.full(3, i, 'f'), np.int32(i)) for i in range(comm.rank, n, comm.size)]
    return chainermn.datasets.write_shards(mine, prefix, samples_per_shard, comm)


def train(comm, n_epochs, stop=None):
    """Train; return the samples that this rank used, by iteration."""
    used = []
    iterator = ShardedIterator('train-*.npz', 12 // comm.size, comm)
    model = chainer.links.Linear(3, 1)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(0), comm).setup(model)

    def convert(batch, device):
        used.append([int(t) for _, t in batch])
        return chainer.dataset.concat_examples(batch, device)

    updater = chainer.training.StandardUpdater(
        iterator, optimizer, converter=convert,
        loss_func=lambda x, t: chainer.functions.sum(model(x)))
    trainer = chainer.training.Trainer(
        updater, (stop, 'iteration') if stop else (n_epochs, 'epoch'), out='.')
    saver = make_saver(comm, '.', 'checkpointer')
    trainer.extend(saver, trigger=(5, 'iteration'))
    saver.maybe_load(trainer, optimizer)
    trainer.run()
    return used, iterator.epoch_detail


def test_a_killed_job_continues_on_other_ranks(comm, shared_folder):
    """After 13 iterations the job is killed; it was saved at iteration 10."""
    write(comm)
    used = run_on(comm, min(2, comm.size), lambda group: train(group, None, stop=13))
    rest = run_on(comm, min(4, comm.size), lambda group: train(group, 2))
    counts = collections.Counter()
    for mine, _ in used:
        counts.update(itertools.chain(*mine[:10]))
    for mine, detail in rest:
        counts.update(itertools.chain(*mine))
        assert 2 <= detail < 2.12
    check_once(counts, 100)


@pytest.mark.mpi_skip
@pytest.mark.parametrize('on_error', ['raise', 'skip'])
def test_hdf5(tmp_path, on_error):
    """Of the iterator alone, and in a snapshot of a trainer."""
    pytest.importorskip('h5py', reason='needs h5py')
    used = []

    def make_trainer():
        iterator = ShardedIterator([range(10), range(10, 37)], 4, Alone(), on_error=on_error)
        model = chainer.links.Linear(1, 1)
        updater = chainer.training.StandardUpdater(
            iterator, chainer.optimizers.SGD(0).setup(model),
            converter=lambda batch, device: (used.extend(batch), np.zeros((4, 1), 'f'))[1],
            loss_func=lambda x: chainer.functions.sum(model(x)))
        trainer = chainer.training.Trainer(updater, (30, 'iteration'), out=str(tmp_path))
        trainer.extend(extensions.snapshot(
            savefun=chainer.serializers.save_hdf5, filename='{.updater.iteration}'),
            trigger=(11, 'iteration'))
        return trainer, iterator

    trainer, iterator = make_trainer()
    trainer.run()
    chainer.serializers.save_hdf5(tmp_path / 'alone', iterator)
    expected = used[4 * 11:]
    used.clear()
    trainer, resumed = make_trainer()
    chainer.serializers.load_hdf5(tmp_path / '11', trainer)
    trainer.run()
    assert used == expected and resumed.epoch_detail == iterator.epoch_detail
    following = next(iterator)
    resumed.reset()
    chainer.serializers.load_hdf5(tmp_path / 'alone', resumed)
    assert resumed.epoch_detail == 120 / 37 and next(resumed) == following
    assert resumed.previous_epoch_detail == 120 / 37
    iterator.finalize()
    resumed.finalize()


@pytest.mark.mpi_skip
def test_a_snapshot_without_the_iterator():
    """With strict=False, it stays where it is."""
    for on_error in ('raise', 'skip'):
        iterator = ShardedIterator([range(10)], 4, Alone(), on_error=on_error)
        next(iterator)
        chainer.serializers.NpzDeserializer({}, strict=False).load(iterator)
        assert iterator.epoch_detail == .4
        iterator.finalize()


def run_on(comm, size, function):
    """Call a function on the first ranks; return their results."""
    group = comm.split(int(comm.rank >= size), comm.rank)
    result = None
    if comm.rank < size:
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', 'iteration .* was saved by')
            result = function(group)
    return comm.allgather_obj(result)[:size]


@pytest.mark.filterwarnings('ignore:This iterator does not have the reset method')
@pytest.mark.parametrize('is_old', [False, True])
def test_evaluator(comm, shared_folder, is_old):
    """Each sample counts once, in each call."""
    write(comm, n=10)
    used = []
    iterator = ShardedIterator('train-*.npz', 3, comm, repeat=False)
    evaluator = extensions.Evaluator(
        {'main': WithoutReset(iterator) if is_old else iterator}, chainer.Link(),
        eval_func=lambda x, t: used.extend(t.tolist()))
    evaluator = chainermn.create_multi_node_evaluator(evaluator, comm)
    for _ in range(2):
        evaluator()
        assert sorted(itertools.chain(*comm.allgather_obj(used))) == [*range(10)]
        used.clear()


class WithoutReset:
    """An iterator of old programs, which evaluators copy."""

    def __init__(self, iterator):
        self.iterator = iterator
        self.finalize = iterator.finalize

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.iterator)

    def __copy__(self):
        return WithoutReset(copy.copy(self.iterator))


def test_a_snapshot_of_other_shards_is_an_error(comm, shared_folder):
    write(comm)
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(ShardedIterator('train-*.npz', 4, comm, seed=1))
    other = ShardedIterator('train-*.npz', 4, comm, seed=2)
    with pytest.raises(ValueError, match='seed changed from 1 to 2'):
        chainer.serializers.NpzDeserializer(serializer.target).load(other)


@pytest.mark.parametrize('option, value, error', [
    ('batch_size', 0, 'batch_size must be a positive integer'),
    ('seed', -1, 'seed must be'),
    ('seed', 2**32, 'less than'), ('buffer', 0, 'buffer must be'), ('last', 'some', 'last must be'),
    ('n_prefetch', -1, 'n_prefetch must be'), ('on_error', 'ignore', 'on_error must be'),
    ('shards', 'nothing-*.npz', 'no file matches'), ('shards', '.', 'Pass a pattern'),
    ('shards', [], 'is empty'), ('shards', [range(0)], 'have 0 samples'),
    ('shards', [3], r'a shard must support len\(\) and indexing, but int does not')])
def test_an_invalid_argument_on_one_rank_is_an_error_on_all(comm, option, value, error):
    arguments = {'shards': [range(10)], 'batch_size': 1}
    if comm.rank == comm.size - 1 or option == 'shards':
        arguments[option] = value
    with pytest.raises((ValueError, OSError, RuntimeError), match=error) as caught:
        ShardedIterator(comm=comm, **arguments)
    assert len(set(comm.allgather_obj(str(caught.value)))) == 1


@pytest.mark.mpi(min_size=2)
def test_the_error_shows_only_arguments_that_differ(comm):
    with pytest.raises(ValueError) as caught:
        ShardedIterator([range(10)], 1, comm, seed=comm.rank)
    assert 'rank 0: seed=0\n  rank 1: seed=1\n' in str(caught.value)


@pytest.mark.mpi(min_size=2)
def test_shards_that_differ_between_ranks(comm, shared_folder):
    write(comm)
    comm.barrier()
    names = sorted(glob.glob('train-*.npz'))
    for n in 2, 5:
        with pytest.raises(ValueError) as caught:
            ShardedIterator(names[min(comm.rank, 1):n], 1, comm)
        first, last = ('train-00000.npz, train-00001.npz', 'train-00001.npz') if n == 2 else (
            'train-00000.npz to train-00004.npz', 'train-00001.npz to train-00004.npz')
        assert f"  rank 0: shards='{n}: {first}" in str(caught.value)
        assert re.search(rf"  ranks? 1(-\d+)?: shards='{n - 1}: {last}", str(caught.value))


def test_a_reader_that_contradicts_the_index(comm, shared_folder):
    write(comm)
    comm.barrier()
    iterator = ShardedIterator('train-*.npz', 1, comm, reader=lambda path: range(2))
    with pytest.raises(ShardError, match='the reader returned 2 samples, but .* this shard has '
                                         r'\d+\. Correct the reader'):
        next(iterator)


def test_the_prefix_of_write_shards_instead_of_a_pattern(comm, shared_folder):
    """The prefix that a user passed to write_shards is no pattern of its shards."""
    prefix = os.path.join(shared_folder, "train")
    if comm.rank == 0:
        write_shards(range(10), prefix, 5)
    comm.mpi_comm.Barrier()
    with pytest.raises(FileNotFoundError, match=r"pass '.*train-\*\.npy'"):
        ShardedIterator(prefix, 1, comm)


def test_an_error_of_transform_is_printed_with_the_frames_of_the_program(comm):
    def transform(x):
        raise KeyError('label')

    iterator = ShardedIterator([range(10)], 1, comm, transform=transform, shuffle=False)
    with pytest.raises(ShardError, match="sample 0: KeyError: 'label'") as caught:
        next(iterator)
    common_error.hide_frames(caught.value)
    text = ''.join(traceback.format_exception(caught.value))
    assert text.count(', in transform\n') == 1 and text.count('Traceback') == 2, text
    assert os.path.dirname(chainermn.__file__) not in text
    iterator.finalize()


def test_different_arguments(comm):
    if comm.size == 1:
        pytest.skip('there is no other rank')
    for arguments in [{'seed': comm.rank}, {'batch_size': 1 + comm.rank}]:
        with pytest.raises(ValueError, match='the arguments differ between ranks'):
            ShardedIterator([range(10)], **{'batch_size': 1, 'comm': comm, **arguments})


@pytest.mark.slow
def test_threads_and_files_are_freed(comm, shared_folder):
    write(comm)

    def count():
        return threading.active_count(), len(os.listdir('/proc/self/fd'))

    gc.collect()
    before = count()
    for _ in range(5):
        iterator = ShardedIterator('train-*.npz', 4, comm)
        next(iterator)
        copied = copy.copy(iterator)
        next(copied)
        del iterator, copied
        gc.collect()
    assert all(n <= of_before for n, of_before in zip(count(), before, strict=True))


@pytest.mark.filterwarnings('ignore:.* multi-threaded, use of fork:DeprecationWarning')
def test_in_a_forked_child(comm, shared_folder):
    """The thread of the parent is not there; the child reads on by itself."""
    write(comm)
    iterator = ShardedIterator('train-*.npz', 4, comm)
    next(iterator)
    expected = [int(t) for _, t in next(copy.copy(iterator))]
    read, written = os.pipe()
    child = os.fork()
    if not child:
        os.write(written, str([int(t) for _, t in next(iterator)]).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(read, 1000).decode() == str(expected)
    os.close(read)
    os.close(written)
    iterator.finalize()


def test_as_a_multi_node_iterator(comm):
    iterator = ShardedIterator([range(10)], 1, comm)
    if comm.size > 1:
        with pytest.raises(ValueError, match='all ranks would get the part of rank 0 only'):
            chainermn.iterators.create_multi_node_iterator(iterator, comm)
    alone = ShardedIterator([range(10)], 10, comm.split(comm.rank, 0), shuffle=False)
    batches = chainermn.iterators.create_multi_node_iterator(alone, comm)
    assert next(batches) == [*range(10)]
    for each in iterator, alone:
        each.finalize()
