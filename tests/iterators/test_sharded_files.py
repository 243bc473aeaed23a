"""Errors of readers of shards; damaged, missing and changing files: one error, or a count."""

import errno
import io
import itertools
import logging
import pathlib
import re
import subprocess
import sys
import tarfile
import zipfile

import chainer
import numpy as np
import pytest
from each_case import each_case
from ranks_in_threads import Alone
from shared_fixtures import create
from time_limits import seconds
from version7 import Version7Communicator

import chainermn
from chainermn._shards import open_shards
from chainermn._shards.npy_files import NpyShard
from chainermn.iterators import ShardedIterator, ShardError


@pytest.fixture(scope='module', params=['naive', 'version7'])
def comm(request):
    return create(request.param)


def alone(shards, batch_size, **options):
    """The samples of an epoch on one rank."""
    options = {'repeat': False, 'shuffle': False, **options}
    iterator = ShardedIterator(shards, batch_size, Alone(), **options)
    samples = [sample for batch in iterator for sample in batch]
    iterator.finalize()
    return samples


# --- formats -------------------------------------------------------------------------------------


def write_tar(path, n=10, kind='w'):
    with tarfile.open(path, kind) as archive:
        for i in range(n):
            for name, content in [(f'part/{i:03}.txt', f'text {i}'), (f'part/{i:03}.cls', str(i)),
                                  (f'part/{i:03}.Seg.PNG', 'x' * i)]:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content.encode()))


@pytest.mark.mpi_skip
def test_broken_parquet_files(tmp_path):
    parquet = pytest.importorskip('pyarrow.parquet')
    path = tmp_path / 'x.parquet'
    parquet.write_table(pytest.importorskip('pyarrow').table([[1], [2]], ['a', 'a']), path)
    with pytest.raises(ShardError, match='several columns are named a'):
        alone(path, 1)
    truncate(path)
    with pytest.raises(ShardError, match=r'x\.parquet cannot be opened: ArrowInvalid'):
        alone(path, 1)


@pytest.mark.mpi_skip
def test_hugging_face(tmp_path):
    pytest.importorskip('pyarrow')
    try:
        from datasets import Dataset
    except ImportError:
        pytest.skip('datasets is not installed')
    data = Dataset.from_dict({'x': [[i, i + 1] for i in range(10)], 'y': [*range(10)]})
    data.save_to_disk(str(tmp_path / 'data'), num_shards=3)
    samples = alone(str(tmp_path / 'data'), 4)
    assert [int(sample['y']) for sample in samples] == [*range(10)]
    assert samples[3]['x'].tolist() == [3, 4]


@pytest.mark.mpi_skip
@pytest.mark.parametrize('module, name', [('pyarrow', 'x.arrow'), ('pyarrow.parquet', 'x.parquet')])
def test_a_missing_library_is_named(tmp_path, monkeypatch, module, name):
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_text('...')
    for on_error in ('raise', 'skip'):
        with pytest.raises(ImportError, match='pyarrow'):
            alone(tmp_path / name, 1, on_error=on_error)


@pytest.mark.mpi_skip
def test_own_readers(tmp_path):
    """A function that opens a shard, which need not be a file."""
    closed = []

    class Lines:
        def __init__(self, path):
            self.lines = pathlib.Path(path).read_text().splitlines()

        def __len__(self):
            return len(self.lines)

        def __getitem__(self, i):
            return self.lines[i]

        def close(self):
            closed.append(self)

    for i in range(3):
        (tmp_path / f'{i}.txt').write_text(f'a{i}\nb{i}')
    assert alone(str(tmp_path / '*.txt'), 4, reader=Lines) == ['a0', 'b0', 'a1', 'b1', 'a2', 'b2']
    assert len(closed) == 6  # counted, then read
    assert alone([3, 2], 4, reader=range) == [0, 1, 2, 0, 1]
    with pytest.raises(ShardError, match=r"no reader for '\.txt' files: pass reader="):
        alone(str(tmp_path / '*.txt'), 4)


# --- faults --------------------------------------------------------------------------------------


def write(shared_folder, comm, n=60, samples_per_shard=10):
    """Write shards with the numbers of samples; return the path of one, which is then damaged."""
    if comm.rank == 0:
        data = [(np.full(100, i, 'i4'), np.int32(i)) for i in range(n)]
        chainermn.datasets.write_shards(data, 'train', samples_per_shard)
    comm.barrier()
    return shared_folder / 'train-00003.npz'


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def truncate(path):
    with open(path, 'r+b') as file:
        file.truncate(path.stat().st_size * 2 // 3)


def truncate_data(path):
    """As if the disk was full: the archive is valid, but an array in it is truncated."""
    with zipfile.ZipFile(path, 'w') as archive:
        for name in ('arr_0', 'arr_1'):
            buffer = io.BytesIO()
            np.save(buffer, np.zeros(10))
            archive.writestr(f'{name}.npy', buffer.getvalue()[:-10])


def write_other_lengths(path):
    np.savez(path, np.zeros(10), np.zeros(9))


def write_objects(path):
    np.savez(path, np.array([{}] * 10))


FAULTS = {
    'corrupted': (flip_a_bit, 'Bad CRC-32'),
    'truncated': (truncate, 'BadZipFile|has changed'),
    'truncated data': (truncate_data, 'EOF: reading array data'),
    'empty file': (lambda path: path.write_bytes(b''), 'the file is empty'),
    'no arrays': (lambda path: np.savez(path), 'no arrays|has changed'),
    'missing': (lambda path: path.unlink(), 'missing'),
    'a folder': (lambda path: (path.unlink(), path.mkdir()), 'IsADirectoryError|Is a directory'),
    'other lengths': (write_other_lengths, 'different lengths'),
    'objects': (write_objects, 'Object arrays cannot be loaded'),
    'no array': (lambda path: path.write_text('{}' * 100), 'BadZipFile'),
}


@pytest.mark.compares_calls
@pytest.mark.parametrize('has_index', [True, False], ids=['index', 'counted'])
@each_case('fault', FAULTS)
def test_a_broken_shard_is_one_error_on_all_ranks(comm, shared_folder, fault, has_index):
    """One rank finds it: its thread with an index, otherwise when it counts the samples."""
    damage, text = FAULTS[fault]
    damage_shard(comm, shared_folder, damage, has_index)
    if fault == 'missing' and not has_index:
        return  # nothing says so
    with pytest.raises((ShardError, FileNotFoundError)) as caught:
        iterator = ShardedIterator('train-*.npz', 2, comm, repeat=False, last='repeat')
        for _ in iterator:
            comm.allreduce_obj(0)
    message = str(caught.value)
    assert 'train-00003' in message and re.search(text, message), message
    assert not has_index or "pass on_error='skip'" in message or 'pass a list' in message
    assert len(set(comm.allgather_obj(message))) == 1


def damage_shard(comm, shared_folder, damage, has_index):
    """Write new shards, of which one is damaged."""
    if comm.rank == 0:
        for path in shared_folder.glob('*'):
            path.rmdir() if path.is_dir() else path.unlink()
    path = write(shared_folder, comm)
    if comm.rank == 0:
        damage(path)
        if not has_index:
            (shared_folder / 'train.index.json').unlink()
    comm.barrier()


@each_case('fault, has_index', [(fault, n % 2) for n, fault in enumerate(FAULTS)])
def test_a_broken_shard_is_skipped(comm, shared_folder, caplog, fault, has_index):
    damage_shard(comm, shared_folder, FAULTS[fault][0], has_index)
    caplog.clear()
    with caplog.at_level(logging.WARNING, 'chainermn'):
        iterator = ShardedIterator('train-*.npz', 5, comm, repeat=False, on_error='skip')
        mine = [int(t) for batch in iterator for _, t in batch]
    found = sorted(itertools.chain(*comm.allgather_obj(mine)))
    assert found == [*range(30), *range(40, 60)]
    if fault == 'missing' and not has_index:
        return  # nothing says so
    assert iterator.skipped_shards == 1 and not iterator.skipped
    logged = comm.allgather_obj([record.getMessage() for record in caplog.records])
    assert sum('train-00003' in text for text in itertools.chain(*logged)) == 1


def test_broken_samples_are_skipped(comm, shared_folder):
    """A sample, or all of a shard, that turn out to be broken in training."""
    def break_some(sample):
        if int(sample[1]) in (7, *range(20, 30)):
            raise OverflowError('too bright')
        return int(sample[1])

    write(shared_folder, comm)
    if not isinstance(comm, Version7Communicator):  # it has no way to tell the other ranks
        with pytest.raises(ShardError, match=r'sample \d: OverflowError: too bright'):
            for _ in ShardedIterator('train-*.npz', 5, comm, transform=break_some):
                comm.allgather_obj(0)
    iterator = ShardedIterator('train-*.npz', 5, comm, transform=break_some, shuffle=False,
                               repeat=False, on_error='skip')
    observation, reporter = {}, chainer.Reporter()
    with reporter.scope(observation):
        batches = [*iterator]
    assert all(batches)  # one without any readable sample repeats the one before
    mine = {*itertools.chain(*batches)}
    assert set().union(*comm.allgather_obj(mine)) == {*range(7), *range(8, 20), *range(30, 60)}
    assert observation == {'skipped_samples': iterator.skipped, 'skipped_shards': 0}
    assert sum(comm.allgather_obj(iterator.skipped)) == 11


@pytest.mark.parametrize('has_index, name', [(True, 'train-00001.npz'), (False, 'train-00004.npz')])
def test_resuming_when_another_shard_is_broken(comm, shared_folder, has_index, name):
    """One was broken before, one breaks while the job is not running, or is repaired."""
    def make():
        return ShardedIterator('train-*.npz', 3, comm, repeat=False, buffer=2, on_error='skip')

    damage_shard(comm, shared_folder, truncate, has_index)
    iterator = make()
    used = [int(t) for _, t in next(iterator)]
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(iterator)
    iterator.finalize()
    comm.barrier()
    if comm.rank == 0:
        (shared_folder / 'train-00003.npz').write_bytes((shared_folder / name).read_bytes())
        (shared_folder / name).write_bytes(b'')
    comm.barrier()
    iterator = make()
    chainer.serializers.NpzDeserializer(serializer.target).load(iterator)
    number = int(name[6:11])
    broken = {*range(number * 10, number * 10 + 10)}
    before = {*itertools.chain(*comm.allgather_obj(used))}
    rest = [int(t) for batch in iterator for _, t in batch]
    after = {*itertools.chain(*comm.allgather_obj(rest))}
    assert before | after == {*range(30), *range(40, 60)} - (broken - before)
    assert sum(comm.allgather_obj(iterator.skipped)) == len(broken - before) > 0


def test_the_number_of_skipped_samples_is_saved(comm):
    def fail_at_even_numbers(x):
        if x % 2 == 0:
            raise ValueError('even')
        return x

    def make():
        return ShardedIterator([range(40 * comm.size)], 10, comm, transform=fail_at_even_numbers,
                               on_error='skip')

    iterator = make()
    next(iterator)
    n = iterator.skipped
    assert sum(comm.allgather_obj(n)) > 0
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(iterator)
    iterator.finalize()
    resumed = make()
    chainer.serializers.NpzDeserializer(serializer.target).load(resumed)
    assert resumed.skipped == n
    assert len(next(resumed)) + resumed.skipped == n + 10
    resumed.finalize()


@pytest.mark.mpi_skip
def test_a_transform_that_raises_stop_iteration():
    """It does not end the batch."""
    def transform(x):
        return next(iter([])) if x == 3 else x

    assert alone([range(10)], 5, transform=transform, on_error='skip') == [0, 1, 2, *range(4, 10)]
    with pytest.raises(ShardError, match='sample 3: StopIteration'):
        alone([range(10)], 5, transform=transform)


@pytest.mark.mpi_skip
@pytest.mark.parametrize('shuffle', [True, False])
def test_no_sample_can_be_read(shuffle):
    def fail(sample):
        raise ValueError('never')

    for first in (0, 1):
        with pytest.raises(ShardError, match='found no readable sample in the first batch'):
            alone([range(first), range(10)], 3, transform=fail, on_error='skip', shuffle=shuffle)

    def fail_at_first(sample):
        if sample < 8:
            raise ValueError('never')
        return sample

    found = alone([range(5), range(5, 12)], 3, transform=fail_at_first, on_error='skip')
    assert {*found} == {8, 9, 10, 11}


@pytest.mark.mpi_skip
def test_a_batch_that_is_repeated_is_read_again(tmp_path):
    """A batch of broken samples repeats the one before, as it was before the program changed it."""
    np.save(tmp_path / 'x.npy', np.arange(20.).reshape(10, 2))

    def fail_at_last(sample):
        if sample[0] > 8:
            raise ValueError('never')
        return sample

    iterator = ShardedIterator(tmp_path / 'x.npy', 5, Alone(), shuffle=False, repeat=False,
                               transform=fail_at_last, on_error='skip', n_prefetch=0)
    for batch in iterator:
        assert [sample.tolist() for sample in batch] == np.arange(10.).reshape(5, 2).tolist()
        batch.pop()[...] = -1
    assert iterator.skipped == 5


@pytest.mark.mpi_skip
def test_a_shard_that_changes(tmp_path):
    """While it is read, or between two epochs."""
    for name in 'ab':
        np.save(tmp_path / f'{name}.npy', np.arange(1000))
    (tmp_path / 'b.npy').rename(tmp_path / 'c.npy')

    iterator = ShardedIterator(str(tmp_path / '*.npy'), 100, Alone(), buffer=1, n_prefetch=0)
    for _ in range(5):
        next(iterator)
    np.save(tmp_path / 'a.npy', np.arange(1001))
    np.save(tmp_path / 'c.npy', np.arange(1001))
    with pytest.raises(ShardError, match=r'now 1,001 samples and .*, previously 1,000'):
        for _ in range(20):
            next(iterator)
    iterator.finalize()
    shard = NpyShard(str(tmp_path / 'a.npy'), memory=0)
    truncate(tmp_path / 'a.npy')
    with pytest.raises(ValueError, match='was truncated while it was open'):
        shard.read(np.array([1000]))
    shard.close()


@pytest.mark.mpi_skip
@pytest.mark.parametrize('error, n_attempts', [
    (OSError(errno.EIO, 'I/O error'), 3), (OSError(errno.ESTALE, 'stale'), 3),
    (ConnectionResetError('reset'), 3), (PermissionError(errno.EACCES, 'no'), 1),
    (ValueError('wrong'), 1)])
def test_transient_errors_are_retried(monkeypatch, error, n_attempts):
    monkeypatch.setattr(open_shards, '_PAUSES', (.01, .01))
    attempts = []

    class Shard:
        def __init__(self, failures):
            self.failures = failures

        def __len__(self):
            return 10

        def __getitem__(self, i):
            if i == 3 and len(attempts) < self.failures:
                attempts.append(i)
                raise error
            return i

    if n_attempts == 3:
        assert alone([Shard(2)], 5) == [*range(10)]
        assert len(attempts) == 2
        attempts.clear()
    with pytest.raises(ShardError, match=f'sample 3: {type(error).__name__}'):
        alone([Shard(100)], 5)
    assert len(attempts) == n_attempts + 1  # then the sample is read alone, to name it


@pytest.mark.mpi_skip
@pytest.mark.parametrize('text', [
    '', '{}', '[]', '{"format": "chainermn shards 2", "shards": {}}',
    '{"format": "chainermn shards 1", "shards": {"train-00000.npz": 3}}'])
def test_a_broken_index(tmp_path, text):
    np.savez(tmp_path / 'train-00000.npz', np.arange(3))
    (tmp_path / 'train.index.json').write_text(text)
    with pytest.raises(ValueError, match='Delete it; the samples are then counted again'):
        alone(str(tmp_path / 'train-*.npz'), 1)


def write_member(path, kind):
    with tarfile.open(path, 'w') as archive:
        info = tarfile.TarInfo('d/x.a')
        info.type, info.linkname = kind, 'y'
        archive.addfile(info)


@pytest.mark.mpi_skip
@pytest.mark.parametrize('damage, text', [
    (lambda path: truncate(path), 'ReadError|truncated'),
    (lambda path: path.write_bytes(path.read_bytes()[:512 * 5]), 'truncated'),
    (lambda path: write_tar(path, kind='w:gz'), 'ReadError'),
    (lambda path: path.write_bytes(b'x' * 2000), 'ReadError'),
    (lambda path: write_member(path, tarfile.LNKTYPE), 'd/x.a is a hard link to y'),
    (lambda path: write_member(path, tarfile.SYMTYPE), 'd/x.a is a symbolic link to y'),
    (lambda path: write_member(path, b'M'), "d/x.a has the unknown type b'M'"),
])
def test_a_broken_tar_file(tmp_path, damage, text):
    write_tar(tmp_path / 'x.tar')
    damage(tmp_path / 'x.tar')
    with pytest.raises(ShardError, match=rf'x\.tar cannot be opened: .*({text})'):
        alone(tmp_path / 'x.tar', 1)


MEMORY = """
import pathlib, sys
import numpy as np
import chainermn
from chainermn.iterators import ShardedIterator


def resident(key):
    lines = pathlib.Path('/proc/self/status').read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

n_shards, row = map(int, sys.argv[1:])
for i in range(n_shards):  # sparse: they take no space on the disk
    np.lib.format.open_memmap(f'{i:04}.npy', 'w+', 'u1', (8 * 10**9 // n_shards // row, row))
comm = chainermn.create_communicator('naive')
pathlib.Path('/proc/self/clear_refs').write_text('5')
before = resident('VmRSS')
iterator = ShardedIterator('*.npy', 64, comm)
for _ in range(100):
    next(iterator)
print((resident('VmHWM') - before) / 1e6)
"""


@pytest.mark.mpi_skip
@pytest.mark.slow
@pytest.mark.parametrize('n_shards, row', [(80, 100_000), (800, 1000), (8, 1000)])
def test_memory_with_8_gb_of_shards(tmp_path, n_shards, row):
    done = subprocess.run([sys.executable, '-c', MEMORY, str(n_shards), str(row)],
                          cwd=tmp_path, text=True, capture_output=True, timeout=seconds(50))
    assert not done.returncode, done.stderr
    assert float(done.stdout) < 300  # MB
