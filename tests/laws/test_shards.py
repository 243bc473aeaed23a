"""Laws of shards: samples are read as they were written, by any tool and with any option."""

import copy
import dataclasses
import datetime
import decimal
import glob
import importlib
import itertools
import os
import pathlib
import random
import subprocess
import tempfile

import chainer
import hypothesis
import numpy as np
import pytest
from equal_values import assert_same
from hypothesis import strategies as st
from laws.law import law, planted
from laws.values import assert_read, kinds, make
from mpi4py import MPI

import chainermn
from chainermn._shards import arrow_files, listing
from chainermn._shards.tar_file import TarShard
from chainermn.iterators import ShardedIterator

# All ranks may draw the same few samples, or empty arrays.
pytestmark = pytest.mark.filterwarnings('ignore:write_shards. all .* ranks wrote the same')

batch_sizes = st.sampled_from([2, 1, 3, 7, 50])
seeds = st.integers(0, 999)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A temporary folder, the current folder of all ranks."""
    monkeypatch.chdir(MPI.COMM_WORLD.bcast(tmp_path))


@pytest.fixture
def pa():
    """PyArrow."""
    pytest.importorskip('pyarrow.parquet')
    return pytest.importorskip('pyarrow')


def read(comm, shards, batch_size, **options):
    """Return all samples of an epoch in order, on all ranks."""
    iterator = ShardedIterator(shards, batch_size, comm, repeat=False, **options)
    by_rank = comm.allgather_obj([*iterator])
    iterator.finalize()
    return [sample for step in itertools.zip_longest(*by_rank, fillvalue=())
            for batch in step for sample in batch]


def on_rank_0(comm, function, *refused):
    """Call a function on rank 0 and return its result. Reject programs that a tool refused."""
    result = None
    if comm.rank == 0:
        try:
            result = function()
        except Exception as error:
            result = None if isinstance(error, refused) else error
    result = comm.bcast_obj(result)
    if isinstance(result, Exception):
        raise result
    hypothesis.assume(result is not None)
    return result


# --- write_shards --------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Written:
    seed: int
    form: str
    kinds: tuple
    lengths: tuple[int, ...]  # numbers of samples, which the ranks use in turn
    are_streams: tuple[bool, ...]  # whether datasets have no length and reuse their arrays
    samples_per_shard: int
    batch_size: int
    n_prefetch: int
    buffer: int  # a larger buffer leaves less memory for each shard
    shuffle: bool
    is_saved_again: bool  # compressed, or in Fortran order

    def rows(self, rank):
        draw = np.random.RandomState([self.seed, rank])
        n = self.lengths[rank % len(self.lengths)]
        return [tuple(make(draw, kind) for kind in self.kinds) for _ in range(n)]

    def sample(self, row):
        names = 'x', 'a.b', '../c d/é.npy'
        return (row[0] if self.form == 'alone' else [*row] if self.form == 'list' else
                dict(zip(names, row, strict=False)) if self.form == 'dict' else row)


written = st.builds(
    Written, seed=seeds, form=st.sampled_from(['alone', 'tuple', 'alone', 'dict', 'list']),
    kinds=st.lists(kinds, min_size=1, max_size=3).map(tuple),
    lengths=st.tuples(st.integers(1, 12), st.integers(0, 12), st.integers(0, 12)),
    are_streams=st.tuples(st.booleans(), st.booleans()), samples_per_shard=st.integers(1, 8),
    batch_size=batch_sizes, n_prefetch=st.sampled_from([0, 2]),
    buffer=st.sampled_from([1, 10**5, 2**27]), shuffle=st.booleans(),
    is_saved_again=st.sampled_from([True, True, False]))


def reusing(rows):
    """Yield the rows, each in the same arrays."""
    buffers = [np.array(x) if isinstance(x, np.ndarray) else x for x in (rows or [()])[0]]
    for row in rows:
        for buffer, x in zip(buffers, row, strict=True):
            if isinstance(buffer, np.ndarray):
                buffer[...] = x
        yield tuple(buffer if isinstance(buffer, np.ndarray) else x
                    for buffer, x in zip(buffers, row, strict=True))


class KeptArrays:
    """A fault: a column that does not copy the arrays that it gets."""

    def __init__(self, first):
        self.arrays, self.dtype = [], first.dtype

    def append(self, array):
        self.arrays.append(array)

    def array(self):
        return np.array(self.arrays, self.dtype)


@law(written, planted(importlib.import_module('chainermn.datasets.write_shards'), '_Column',
                      lambda _: KeptArrays))
def test_written_shards(comm, program, folder):
    """``ShardedIterator`` reads exactly what the ranks wrote with ``write_shards``."""
    rows = program.rows(comm.rank)
    is_stream = [program.are_streams[rank % 2] for rank in range(comm.size)]
    stream = map(program.sample, reusing(rows))
    paths = chainermn.datasets.write_shards(
        stream if is_stream[comm.rank] else [*map(program.sample, rows)], 'train',
        program.samples_per_shard, comm, overwrite=True)
    if program.is_saved_again and comm.rank == 0:
        os.remove('train.index.json')
        for path in paths:
            content = np.load(path)
            if isinstance(content, np.ndarray):
                np.save(path, np.asfortranarray(content))
            else:
                with content:
                    np.savez_compressed(path, **content)
    comm.barrier()
    shards, is_in_turns = [], any(is_stream) and not program.seed % 2
    for rank in range(comm.size):
        rows, n = program.rows(rank), program.samples_per_shard
        shards += [((i, rank) if is_in_turns else (rank, i), rows[i:i + n])
                   for i in range(0, len(rows), n)]
    shards = [rows for _, rows in sorted(shards, key=lambda each: each[0])]
    options = {'shuffle': program.shuffle, 'buffer': program.buffer}
    expected = read(comm, shards, program.batch_size, **options)  # read from lists
    found = read(comm, paths if program.seed % 2 else 'train-*.np[yz]', program.batch_size,
                 n_prefetch=program.n_prefetch, **options)
    assert len(found) == len(expected) == sum(map(len, shards))
    for one, other in zip(found, expected, strict=True):
        other = program.sample(other)
        assert_read(one, tuple(other) if program.form == 'list' else other)


# --- tar -----------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Archive:
    seed: int
    files: tuple  # folder, name, kind, number of the target, sizes of data and of holes
    options: tuple[str, ...]
    batch_size: int

    def write(self):
        """Return the path and the content of each file that GNU tar extracts."""
        draw, files = np.random.RandomState(self.seed), []
        root = pathlib.Path(tempfile.mkdtemp(dir=os.getcwd()))
        for parent, name, kind, target, pieces in self.files:
            path = root / parent / name
            if os.path.lexists(path):
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            other = files[target % len(files)] if files else None
            if kind == 'hard link' and other:
                os.link(other, path, follow_symlinks=False)
            elif kind == 'symbolic link' and other:
                path.symlink_to(os.path.relpath(other, path.parent))
            elif kind == 'folder' and parent != 'a/b.c':
                path.symlink_to(os.path.relpath(root / 'a/b.c', path.parent))
                continue
            else:
                with open(path, 'wb') as file:
                    for n in pieces:
                        file.write(draw.bytes(n)) if n > 0 else file.seek(-n, 1)
                    file.truncate()
            files.append(path)
        (root / 'out').mkdir()
        for command in (['-cf', 'x.tar', *self.options, 'a'], ['-xf', 'x.tar', '-C', 'out']):
            subprocess.run(['tar', *command], cwd=root, check=True, capture_output=True)
        found = [path for path in root.glob('out/**/*') if not path.is_dir()]
        if not all(path.exists() for path in found):  # a symbolic link that is also a hard link
            return None
        return str(root / 'x.tar'), {
            str(path.relative_to(root / 'out')).lower(): path.read_bytes() for path in found}


archives = st.builds(
    Archive, seed=seeds, batch_size=batch_sizes,
    files=st.lists(st.tuples(
        st.sampled_from(['a', 'a/b.c', 'a/' + 'x' * 120]),
        st.sampled_from([f'{stem}.{extension}' for stem in ('0', '1é', '2\n')
                         for extension in ('txt', 'Seg.PNG', 'é')]),
        st.sampled_from(['file', 'symbolic link', 'hard link', 'symbolic link', 'folder']),
        st.integers(0, 9),
        st.lists(st.sampled_from([1, 511, 512, 5000, -1, -4096, -70000]), max_size=4).map(tuple)),
        min_size=5, max_size=9).map(tuple),
    options=st.tuples(
        st.sampled_from(['--sparse', '--sort=name']),
        st.sampled_from(['--format=gnu', '--format=oldgnu', '--format=posix', '--format=ustar',
                         '--sparse-version=0.0', '--sparse-version=0.1']),
        st.sampled_from(['--sort=none', '--label=x.y', '--sort=none', '--hard-dereference',
                         '--dereference'])))


@law(archives, planted(
    TarShard, '_read_sparse', lambda read: lambda self, file: read(self, file).rstrip(b'\0')))
def test_tar(comm, program, folder):
    """Files in tar archives of all formats, with links and holes, are read as by GNU tar."""
    path, expected = on_rank_0(comm, program.write, subprocess.CalledProcessError)
    samples = read(comm, path, program.batch_size)
    found = [(os.path.normpath(f'{sample["__key__"]}.{extension}'), content) for sample in samples
             for extension, content in sample.items() if extension != '__key__']
    assert len(found) == len(expected) and dict(found) == expected


# --- Parquet and Arrow ---------------------------------------------------------------------------

LEAVES = {
    'float16': lambda draw: np.float16(draw.randint(-100, 100)),
    'float32': lambda draw: draw.choice([draw.randint(-9, 9) / 4, float('inf')]),
    'float64': lambda draw: draw.uniform(-9, 9), 'bool_': lambda draw: draw.random() < .5,
    **dict.fromkeys(['string', 'large_string', 'string_view'],
                    lambda draw: ''.join(draw.choices('aé\0日', k=draw.randint(0, 20)))),
    **dict.fromkeys(['binary', 'large_binary', 'binary_view'],
                    lambda draw: bytes(draw.choices(b'\0ab', k=draw.randint(0, 20)))),
    'null': lambda draw: None,
    **dict.fromkeys(['date32', 'date64'],
                    lambda draw: datetime.date.fromordinal(draw.randint(7 * 10**5, 8 * 10**5))),
    'timestamp': lambda draw: datetime.datetime(1950, 1, 1) + datetime.timedelta(
        seconds=draw.randint(0, 10**9)),
    'duration': lambda draw: datetime.timedelta(microseconds=draw.randint(-10**9, 10**9)),
    'time64': lambda draw: datetime.time(draw.randint(0, 23), 3, 4),
    'decimal128': lambda draw: decimal.Decimal(draw.randint(-10**9, 10**9)).scaleb(-3),
}
ARGUMENTS = {'timestamp': [('s',), ('us',), ('us', 'Europe/Berlin')], 'duration': [('us',)],
             'time64': [('us',)], 'decimal128': [(20, 3)]}
INTEGERS = [f'{sign}int{bits}' for sign in ('', 'u') for bits in (8, 16, 32, 64)]

#: The name of a pyarrow function that creates a type, and its arguments.
leaves = st.sampled_from([(name, *each) for name in (*INTEGERS, *LEAVES)
                          for each in ARGUMENTS.get(name, [()])])
types = st.recursive(leaves, lambda inner: st.one_of(
    st.tuples(st.sampled_from(['list_', 'large_list', 'list_view']), inner),
    st.tuples(st.just('list_'), inner, st.integers(1, 3)),
    st.tuples(st.just('map_'), st.just(('string',)), inner),
    st.tuples(st.just('struct'), st.lists(inner, max_size=3).map(tuple)),
    st.tuples(st.just('dictionary'), st.sampled_from([('int8',), ('uint16',), ('int64',)]),
              st.sampled_from([('string',), ('int64',), ('float64',), ('binary',)]))), max_leaves=3)


@dataclasses.dataclass(frozen=True)
class Table:
    seed: int
    type: tuple
    length: int
    nulls: float
    cut: int  # number of rows removed from the beginning
    chunk: int
    group: int
    is_run_end_encoded: bool
    format: str
    batch_size: int
    shuffle: bool

    def write(self, pa):
        """Return the path, the rows and the type, as pyarrow reads them."""
        draw = random.Random(self.seed)
        values = [value(draw, self.type, self.nulls) for _ in range(self.length)]
        array = pa.array(values, arrow_type(pa, self.type))[self.cut:]
        if self.is_run_end_encoded:
            from pyarrow import compute
            array = compute.run_end_encode(array)
        column = pa.chunked_array(
            [array[i:i + self.chunk] for i in range(0, len(array), self.chunk)], array.type)
        table = pa.table({'id': pa.array(range(len(array)), pa.int32()), 'x': column})
        path = os.path.join(tempfile.mkdtemp(dir=os.getcwd()), f'x.{self.format.split()[0]}')
        if self.format == 'parquet':
            pa.parquet.write_table(table, path, row_group_size=self.group)
            table = pa.parquet.read_table(path)
        else:
            create = pa.ipc.new_stream if 'stream' in self.format else pa.ipc.new_file
            with pa.OSFile(path, 'wb') as file, create(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=self.group)
        return path, table.to_pylist(), table.schema.field('x').type


def arrow_type(pa, kind):
    name, *arguments = kind
    if name == 'struct':
        return pa.struct([(f'f{i}', arrow_type(pa, each)) for i, each in enumerate(arguments[0])])
    return getattr(pa, name)(*(arrow_type(pa, each) if isinstance(each, tuple) else each
                               for each in arguments))


def value(draw, kind, nulls):
    name, *arguments = kind
    if draw.random() < nulls:
        return None
    if name in INTEGERS:
        limits = np.iinfo(name)
        return draw.choice([limits.min, limits.max, draw.randint(limits.min, limits.max)])
    if name == 'struct':
        return {f'f{i}': value(draw, each, nulls) for i, each in enumerate(arguments[0])}
    if name == 'map_':
        return [(f'k{i}', value(draw, arguments[1], nulls)) for i in range(draw.randint(0, 2))]
    if name == 'dictionary':
        return value(draw, arguments[1], 0)
    if 'list' in name:
        n = arguments[1] if len(arguments) > 1 else draw.randint(0, 3)
        return [value(draw, arguments[0], nulls) for _ in range(n)]
    return LEAVES[name](draw)


tables = st.builds(
    Table, seed=seeds, type=types, length=st.integers(4, 20), nulls=st.sampled_from([0, .1, .5, 1]),
    cut=st.integers(0, 3), chunk=st.sampled_from([3, 50]), group=st.sampled_from([3, 1, 100]),
    is_run_end_encoded=st.booleans(),
    format=st.sampled_from(['parquet', 'arrow', 'arrow stream']), batch_size=batch_sizes,
    shuffle=st.booleans())


def assert_value(pa, found, expected, kind):
    """Assert that an object is the result of ``to_pylist``, in the matching NumPy type."""
    types = pa.types
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        kind = kind.value_type
    if expected is None:
        assert found is None
    elif isinstance(expected, list) and not types.is_map(kind):
        if types.is_primitive(kind.value_type) and not types.is_temporal(kind.value_type):
            whole = np.dtype(kind.value_type.to_pandas_dtype())
            assert found.dtype == (object if None in expected else whole)
        assert isinstance(found, np.ndarray) and found.ndim == 1 and found.flags.writeable
        for one, other in zip(found, expected, strict=True):
            assert_value(pa, one, other, kind.value_type)
    elif types.is_struct(kind):
        assert [*found] == [*expected]
        for field in kind:
            assert_value(pa, found[field.name], expected[field.name], field.type)
    elif types.is_date(kind) or types.is_timestamp(kind) or types.is_duration(kind):
        if getattr(expected, 'tzinfo', None):
            expected = expected.astimezone(datetime.timezone.utc).replace(tzinfo=None)
        assert isinstance(found, (np.datetime64, np.timedelta64))
        assert found == (np.timedelta64 if types.is_duration(kind) else np.datetime64)(expected)
    elif types.is_primitive(kind) and not types.is_time(kind):
        assert type(found) is np.dtype(kind.to_pandas_dtype()).type and found.item() == expected
    else:
        assert type(found) is type(expected) and found == expected


@law(tables, planted(arrow_files, '_numbers', lambda numbers: lambda array: array.to_numpy(
    zero_copy_only=False)), examples=8)
def test_arrow(comm, program, folder, pa):
    """Parquet and Arrow files give pyarrow's ``to_pylist`` values, in the dtypes of the schema."""
    path, expected, kind = on_rank_0(
        comm, lambda: program.write(pa), pa.ArrowException, NotImplementedError)
    found = read(comm, path, program.batch_size, shuffle=program.shuffle)
    found.sort(key=lambda sample: sample['id'])
    assert [sample['id'] for sample in found] == [row['id'] for row in expected]
    for sample, row in zip(found, expected, strict=True):
        assert_value(pa, sample['x'], row['x'], kind)


# --- patterns ------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Selection:
    counts: tuple[int, ...]  # number of samples of each prefix
    pattern: str
    is_list: bool
    damages: tuple  # indices of shards, each with the kind of damage
    on_error: str
    has_indexes: bool
    batch_size: int

    def write(self):
        """Return the pattern or list of files, and the samples that it selects."""
        root, first, content = tempfile.mkdtemp(dir=os.getcwd()), 0, {}
        for prefix, n in zip(('a/x', 'a/x-1', 'a/b[1]/x', 'c/y'), self.counts, strict=True):
            os.makedirs(os.path.join(root, os.path.dirname(prefix)), exist_ok=True)
            paths = chainermn.datasets.write_shards(
                range(first, first + n), os.path.join(root, prefix), 3)
            for i, path in enumerate(paths):
                content[path] = [*range(first, first + n)][i * 3:i * 3 + 3]
            first += n
        pattern = os.path.join(glob.escape(root), self.pattern)
        selected = sorted({*glob.glob(pattern, recursive=True)})
        names, broken = [*map(os.path.normpath, selected)], {}
        for number, damage in self.damages:
            path = [*content][number % len(content)]
            if path not in broken and (self.on_error == 'skip' or path not in names):
                broken[path] = damage
        for path, damage in broken.items():
            if damage == 'truncated':
                os.truncate(path, os.path.getsize(path) - 1)
            else:
                os.unlink(path)
            if damage == 'folder':
                os.mkdir(path)
        for path in [] if self.has_indexes else pathlib.Path(root).rglob('*.json'):
            os.unlink(path)
        expected = [x for path in names if path not in broken for x in content[path]]
        return (selected if self.is_list else pattern, expected) if expected else None


selections = st.builds(
    Selection, counts=st.tuples(*[st.integers(1, 10)] * 4), is_list=st.booleans(),
    pattern=st.sampled_from([
        f'{parent}/{name}' for parent in ('a', './a', '*', '**', 'a/b[[]1]', 'a/**', '**/**')
        for name in ('x-*.npy', 'x-0000[01].npy', '*[!12].npy', 'x-?-*.npy', 'x-1-*', '*.np[yz]')]),
    damages=st.lists(st.tuples(st.integers(0, 99), st.sampled_from([
        'missing', 'truncated', 'folder'])), max_size=4).map(tuple), has_indexes=st.booleans(),
    on_error=st.sampled_from(['raise', 'skip']), batch_size=batch_sizes)


@law(selections, planted(listing, '_matches', lambda _: lambda pattern, path: True))
def test_patterns(comm, program, folder):
    """Each readable sample of the shards that a pattern or list selects is read once."""
    shards, expected = on_rank_0(comm, program.write)
    assert read(comm, shards, program.batch_size, shuffle=False,
                on_error=program.on_error) == expected


# --- options -------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Reading:
    counts: tuple[int, ...]
    batch_size: int
    seed: int
    shuffle: bool
    repeat: bool
    last: str
    n_prefetch: int
    n_processes: int
    is_transformed: bool
    is_read: bool  # whether a reader function opens the shards
    events: tuple[str, ...]  # the event before each step

    def options(self):
        transform = (lambda sample: (sample, sample[1])) if self.is_transformed else None
        reader = (lambda n: Rows(n)) if self.is_read else None
        return {'n_prefetch': self.n_prefetch, 'n_processes': self.n_processes,
                'transform': transform, 'reader': reader}


class Rows:
    """A shard of arrays."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return np.full(3, i, '>i4'), np.float32(self.n)


readings = st.builds(
    Reading, counts=st.lists(st.sampled_from([5, 0, 1, 20]), min_size=1, max_size=5).map(tuple),
    batch_size=st.sampled_from([2, 1, 5]), seed=seeds, shuffle=st.booleans(), repeat=st.booleans(),
    last=st.sampled_from(['repeat', 'split']), n_prefetch=st.sampled_from([2, 1, 0]),
    n_processes=st.sampled_from([0] * 9 + [1]), is_transformed=st.booleans(),
    is_read=st.booleans(), events=st.lists(
        st.sampled_from(['', '', 'save', 'load', 'reset', 'finalize', 'copy', 'change']),
        min_size=12, max_size=12).map(tuple)).filter(lambda each: sum(each.counts))


def keeping(serialize):
    """A fault: batches that were read in advance remain after a position is loaded."""
    def changed(self, serializer):
        source, self._source = self._source, None
        serialize(self, serializer)
        self._source = source
    return changed


@law(readings, planted(ShardedIterator, 'serialize', keeping))
def test_options(comm, program, folder):
    """``n_prefetch``, ``n_processes``, ``reader`` and ``transform`` do not change the samples."""
    def create(shards, **options):
        return ShardedIterator(shards, program.batch_size, comm, program.repeat, program.shuffle,
                               program.seed, last=program.last, buffer=2, **options)

    def step(iterator):
        batch = next(iterator, None)
        return (batch, iterator.epoch, iterator.is_new_epoch, iterator.epoch_detail,
                iterator.previous_epoch_detail)

    plain = create([*map(Rows, program.counts)], n_prefetch=0)
    expected = [step(plain) for _ in program.events]
    options = program.options()
    transform = options['transform'] or (lambda sample: sample)
    iterator = create(
        program.counts if program.is_read else [*map(Rows, program.counts)], **options)
    saved, position, found = None, 0, []
    for event in program.events:
        if event == 'save':
            saved = chainer.serializers.DictionarySerializer(), position
            saved[0].save(iterator)
        elif event == 'load' and saved:
            chainer.serializers.NpzDeserializer(saved[0].target).load(iterator)
            position = saved[1]
        elif event == 'reset':
            iterator.reset()
            position = 0
        elif event == 'finalize':
            iterator.finalize()
        elif event == 'copy':
            iterator = copy.copy(iterator)
        batch, *progress = step(iterator)
        found.append((position, batch and [*map(_frozen, batch)], progress))
        if batch and event == 'change':
            x, _ = batch[0][0] if program.is_transformed else batch[0]
            x += 1
        position += 1
    iterator.finalize()
    for position, batch, progress in found:
        wanted, *of_plain = expected[position]
        assert_same((batch, progress), (
            wanted and [_frozen(transform(sample)) for sample in wanted], of_plain))


def _frozen(sample):
    return [_frozen(each) if isinstance(each, tuple) else each.copy() for each in sample]
