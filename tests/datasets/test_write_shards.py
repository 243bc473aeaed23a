"""write_shards: errors, and what remains of earlier files."""

import errno
import resource
import warnings

import numpy as np
import pytest
from shared_fixtures import communicators, create, raises_on_all

from chainermn.datasets import write_shards
from chainermn.iterators import ShardedIterator

pytestmark = pytest.mark.every_size

comm = communicators('naive', 'version7')


def test_existing_shards(comm, shared_folder):
    write_shards(np.arange(10) + comm.rank, 'train', 2, comm)
    if comm.rank == 0:
        (shared_folder / 'train-test.npy').write_text('another file')
    with pytest.raises(FileExistsError, match='pass overwrite=True') as caught:
        write_shards(np.arange(10), 'train', 2, comm)
    assert len({*comm.allgather_obj(str(caught.value))}) == 1
    assert all(comm.allgather_obj((shared_folder / 'train.index.json').exists()))
    paths = write_shards(np.arange(4) + comm.rank, 'train', 2, comm, overwrite=True)
    names = sorted(path.name for path in shared_folder.glob('train*'))
    assert comm.allgather_obj(names) == [
        sorted([*paths, 'train.index.json', 'train-test.npy'])] * comm.size
    write_shards(np.arange(4) + comm.rank, 'train-test', 2, comm)  # begins with the other prefix


@pytest.mark.parametrize('dataset, error, text', [
    ([np.zeros(3), np.zeros(4)], ValueError, r'sample 1 is float64\[4\], but the first one is'),
    ([(1, 2), (1, 2.)], ValueError, r'sample 1 is arr_0 int64\[\], arr_1 float64\[\], but'),
    ([(1, 2), (1, 2, 3)], ValueError, 'sample 1 is'),
    ([{'a': 1}, {'b': 1}], ValueError, 'sample 1 is'),
    ([{'arr_0': 1}], TypeError, 'keys of samples must be nonempty strings'),
    ([object()], TypeError, 'sample 0 contains a value of type object'),
    (5, TypeError, 'iterable of samples, not int. On a rank without samples, pass'),
    ([()], ValueError, 'sample 0 is empty'),
    ([1 / 4, None], TypeError, 'sample 1 contains None, .* with -1 for a missing label'),
    (None, TypeError, 'iterable of samples, not NoneType. On a rank'),
    ([{'a\0': 1}], TypeError, 'keys of samples must be nonempty strings'),
    ([b'ab', b'a\0'], ValueError, r"sample 1: NumPy would store b'a.x00' as b'a'"),
    ([(['a', 'b\0'],)], ValueError, r"sample 0: NumPy would store 'b.x00'"),
    ([([1.5, 'b'],)], ValueError, "sample 0: NumPy would store 1.5 as '1.5'"),
    ([([2**53 + 1, .5],)], ValueError, 'sample 0: NumPy would store 9007199254740993'),
    ([np.ma.array([1, 2], mask=[0, 1])], TypeError, 'a masked array'),
    ([np.zeros(1, [('b', 'O')])], TypeError, 'sample 0 contains a value of type ndarray'),
    ([np.zeros(1, {'names': 'ab', 'formats': 'ii', 'offsets': (4, 0)})], TypeError,
     'does not preserve the dtype'),
])
def test_invalid_samples_of_one_rank(comm, shared_folder, dataset, error, text):
    is_last = comm.rank == comm.size - 1
    with pytest.raises(error, match=text) as caught:
        write_shards(dataset if is_last else [0.] * 8, 'train', 5, comm)
    assert len({*comm.allgather_obj(str(caught.value))}) == 1
    assert not [*shared_folder.glob('*.json')]


def test_invalid_arguments(comm, shared_folder):
    for n in (0, 1.5):
        with pytest.raises(ValueError, match='samples_per_shard must be a positive integer'):
            write_shards([1], 'train', n, comm)
    with raises_on_all(FileNotFoundError, match='the folder nowhere does not exist. Create it'):
        write_shards([1], 'nowhere/train', 1, comm)
    if comm.size > 1:
        with pytest.raises(ValueError, match='the samples differ between ranks'):
            write_shards([comm.rank / 2 if comm.rank else 0], 'train', 1, comm)


@pytest.mark.parametrize('sample', [np.zeros(5000), (np.zeros(5000), 1)], ids=['npy', 'npz'])
def test_a_full_disk(comm, shared_folder, sample):
    """No file of the last rank can be longer than 10 kB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if comm.rank == comm.size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    end = 'npz' if isinstance(sample, tuple) else 'npy'
    path = f'train-{comm.size - 1:05}.{end}'
    try:
        with raises_on_all(OSError, f'cannot write {path}: File too large') as caught:
            write_shards([sample], 'train', 1, comm)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*shared_folder.glob(f'*{path}*')] == []
    if comm.size == 1:
        assert caught.value.errno == errno.EFBIG


def test_all_ranks_write_the_whole_dataset(comm, shared_folder):
    """Rank 0 warns if all ranks wrote the same samples, also of a stream, and only then."""
    rows = [(np.full(3, i, 'f'), i % 2) for i in range(10)]
    alike = [rows[0], *rows[comm.rank + 1:]]  # same first sample
    for i, mine in enumerate((rows[comm.rank::comm.size], alike[:3], alike, [],
                              rows if comm.rank == 0 else [])):
        write_shards(mine, f'part{i}', 4, comm)
    for i, whole in enumerate((rows, iter(rows))):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter('always')
            write_shards(whole, f'whole{i}', 4, comm)
        assert len(found) == (comm.rank == 0 < comm.size - 1)
        for each in found:
            assert each.filename == __file__
            assert str(each.message) == (
                f'write_shards: all {comm.size} ranks wrote the same 10 samples, so the shards '
                f'contain each sample {comm.size} times. Pass a different part on each rank, for '
                'example dataset[comm.rank::comm.size], or call write_shards without comm on rank '
                '0 only.')


@pytest.mark.mpi(min_size=2)
@pytest.mark.compares_calls
def test_a_call_on_one_rank_only(comm, shared_folder):
    with raises_on_all(ValueError, match='ranks called different operations') as caught:
        if comm.rank == 0:
            write_shards([1], 'train', 1, comm)
        else:
            comm.barrier()
    assert '  rank 0: write_shards (allgather_obj), called at test_write_shards.py:' in str(
        caught.value)
    assert 'To write on one rank only, omit comm' in str(caught.value)


@pytest.mark.mpi_skip
def test_killed_while_writing(tmp_path):
    """Each file is complete or absent, and without the index, the samples are counted."""
    class Killed(BaseException):
        pass

    class Data:
        def __len__(self):
            return 10

        def __getitem__(self, i):
            if i == 7:
                raise Killed
            return i

    with pytest.raises(Killed):
        write_shards(Data(), tmp_path / 'train', 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        'train-00000.npy', 'train-00001.npy']
    iterator = ShardedIterator(
        str(tmp_path / 'train-*'), 2, create('naive'), repeat=False, shuffle=False)
    assert [int(x) for batch in iterator for x in batch] == [*range(6)]


def test_several_ranks_without_a_communicator(comm, shared_folder):
    if comm.rank == 0:
        write_shards(np.arange(10), 'alone', 2)
        hint = 'several ranks .* pass comm=comm' if comm.size > 1 else r'pass overwrite=True\.$'
        with pytest.raises(FileExistsError, match=hint):
            write_shards(np.arange(10), 'alone', 2)
    comm.barrier()
