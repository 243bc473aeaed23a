"""Laws of the sample order: the same on any number of ranks, and after any interruption."""

import dataclasses
import itertools

import chainer
import hypothesis
import numpy as np
import pytest
from chainer import datasets, iterators
from contract import arrays_in
from equal_values import assert_same
from hypothesis import strategies as st
from laws.law import law, planted
from laws.values import kinds, make
from ranks_in_threads import on_ranks

import chainermn
from chainer_compat.fixes import iterator_state
from chainermn._shards.sample_order import SampleOrder
from chainermn.datasets import scatter
from chainermn.iterators import MultiNodeOrderSampler, ShardedIterator
from chainermn.iterators.multi_node_iterator import _MultiNodeIterator

# Python warns that MultiprocessIterator forks while other threads run.
pytestmark = pytest.mark.filterwarnings(
    'ignore:.* multi-threaded, use of fork:DeprecationWarning')

PROGRESS = 'epoch', 'is_new_epoch', 'epoch_detail', 'previous_epoch_detail', 'current_position'
seeds = st.integers(0, 999)
communicators = st.sampled_from(['naive', 'version7', 'flat'])


def progress(iterator):
    return [getattr(iterator, name) for name in PROGRESS]


def saved(iterator):
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(iterator)
    return serializer.target


def load(state, iterator):
    chainer.serializers.NpzDeserializer(state).load(iterator)


# --- ShardedIterator -----------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Jobs:
    """A job that is killed several times and resumes on different numbers of ranks.

    Attributes:
        counts: The number of samples of each shard.
        runs: For each run: the number of ranks (threads), or 0 for the MPI ranks; the batch size;
            the number of steps until the run is killed; the rank whose snapshot is loaded next;
            and the option ``last``.
        shuffle, seed, buffer, repeat, n_prefetch: Options of the iterator.
    """

    counts: tuple[int, ...]
    runs: tuple[tuple[int, int, int, int, str], ...]
    shuffle: bool
    seed: int
    buffer: int
    repeat: bool
    n_prefetch: int

    def create(self, comm, batch_size, last, **options):
        ends = [*itertools.accumulate(self.counts, initial=0)]
        options = {'repeat': self.repeat, 'n_prefetch': self.n_prefetch, **options}
        return ShardedIterator(
            [*map(range, ends, ends[1:])], batch_size, comm, shuffle=self.shuffle, seed=self.seed,
            buffer=self.buffer, last=last, **options)

    def take(self, order, epoch, taken, size, batch_size, last):
        """Return the samples of a step of all ranks, and the position after it."""
        n, count = sum(self.counts), size * batch_size
        if epoch and not self.repeat:
            return [], (epoch, taken)
        if last == 'drop' and n - taken < count:  # after a run on fewer ranks
            if not self.repeat:
                return [], (1, 0)
            epoch, taken = epoch + 1, 0
        if last == 'split':
            count = min(count, max(n - taken, size * self.repeat))
        stream = (x for i in itertools.count() for x in order(epoch + i * self.repeat)[
            0 if i else taken:])
        samples = [*itertools.islice(stream, count)]
        epoch, taken = epoch + (taken + count) // n, (taken + count) % n
        if last == 'drop' and n - taken < size * batch_size:
            epoch, taken = epoch + 1, 0
        return samples, (epoch, taken) if self.repeat or not epoch else (1, 0)


jobs = st.builds(
    Jobs, counts=st.lists(st.sampled_from([7, 1, 0, 20]), min_size=1, max_size=6).map(tuple),
    runs=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 7), st.integers(1, 9),
                            st.integers(0, 4),
                            st.sampled_from(['split', 'repeat', 'split', 'drop'])),
                  min_size=2, max_size=4).map(tuple),
    shuffle=st.sampled_from([True, True, False]), seed=st.sampled_from([0, 1, 2**32 - 1]),
    buffer=st.sampled_from([100, 2, 1]), repeat=st.sampled_from([True, True, False]),
    n_prefetch=st.sampled_from([0, 0, 2]),
).filter(lambda each: sum(each.counts) >= (35 if 'drop' in str(each.runs) else 1))


def first_window(of_window):
    """A fault: the window of the previous epoch is used again."""
    def changed(self, epoch, number):
        window = self._window
        return window if window and window.key[1] == number else of_window(self, epoch, number)
    return changed


@law(jobs, planted(SampleOrder, '_of_window', first_window), examples=8)
def test_sharded_iterator(comm, program):
    """The batches of ``ShardedIterator`` are intervals of one order, even after a kill."""
    n, orders, found, state = sum(program.counts), [], [], None
    for size, batch_size, n_steps, saver, last in program.runs:
        iterators = on_ranks(size, lambda one, args=(batch_size, last): program.create(
            one, *args)) if size else [program.create(comm, batch_size, last)]
        if state:
            for each in iterators:
                load(state, each)
        steps = [[(next(each, ()), each.epoch, each.current_position, len(each.dataset))
                  for each in iterators] for _ in range(n_steps)]
        state = saved(iterators[saver % len(iterators)])
        for each in iterators:
            each.reset()
        steps.append([(next(each, ()), each.epoch, each.current_position, len(each.dataset))
                      for each in iterators])
        for each in iterators:
            each.finalize()
        if not size:
            size, state = comm.size, comm.bcast_obj(state, saver % comm.size)
            steps = [*zip(*comm.allgather_obj([step for step, in steps]), strict=True)]
        found += [(step, size, batch_size, last, i == n_steps) for i, step in enumerate(steps)]

    def order(epoch):
        while len(orders) <= epoch:
            orders.append([next(alone)[0] for _ in range(n)])
        return orders[epoch]

    alone, = on_ranks(1, lambda one: program.create(
        one, 1, 'repeat', repeat=True, n_prefetch=0))
    after = 0, 0
    for step, size, batch_size, last, is_reset in found:
        before = after
        samples, position = program.take(
            order, *((0, 0) if is_reset else before), size, batch_size, last)
        after = before if is_reset else position
        assert sorted(x for batch, *_ in step for x in batch) == sorted(samples)
        is_uneven = last == 'split' and not program.repeat
        for rank, (batch, epoch, taken, length) in enumerate(step):
            assert len(batch) == len(range(rank, len(samples), size))
            is_at_end = is_uneven and not position[0] and n - position[1] <= rank
            assert (epoch, taken) == ((position[0] + 1, 0) if is_at_end else position)
            used = n - n % (size * batch_size) if last == 'drop' else n
            mine = sum(len(range(rank, min(size * batch_size, used - i), size))
                       for i in range(0, used, size * batch_size))
            assert length == (mine if is_uneven else max(mine, 1))
    if program.shuffle and sum(map(bool, program.counts)) > 4:
        ends = np.cumsum(program.counts)
        assert len({tuple(dict.fromkeys(np.searchsorted(ends, order(epoch), 'right')))
                    for epoch in range(3)}) > 1, 'the shards are in the same order in each epoch'
    alone.finalize()
    assert all(sorted(each) == [*range(n)] for each in orders)
    assert program.shuffle or all(each == [*range(n)] for each in orders)


# --- MultiNodeOrderSampler -----------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Shares:
    n: int
    seed: int
    epoch: int
    shuffle: bool
    even: bool
    runs: tuple[tuple[int, int], ...]  # number of ranks, steps


shares = st.builds(
    Shares, n=st.integers(5, 30), seed=seeds, epoch=st.integers(0, 3), shuffle=st.booleans(),
    even=st.booleans(),
    runs=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=4
                  ).map(tuple))


@law(shares, planted(MultiNodeOrderSampler, '_order', lambda order: (
    lambda self, epoch, used=0: order(self, epoch, used - used % self._size))), examples=20)
def test_order_sampler(program):
    """Ranks divide the order of ``MultiNodeOrderSampler``; a resumed job divides the rest of it."""
    def samplers(size):
        return on_ranks(size, lambda one: MultiNodeOrderSampler(
            program.n, one, program.seed, program.shuffle, program.even))

    alone, = samplers(1)
    whole, before, used = alone._order(program.epoch).tolist(), None, 0
    assert sorted(whole) == [*range(program.n)] and (program.shuffle or whole == sorted(whole))
    for size, n_steps in program.runs:
        resumed = [each.resume(*before) if before else (each._order(program.epoch), 0)
                   for each in samplers(size)]
        if used < size:
            used = 0
        rests = [order[position:].tolist() for order, position in resumed]
        for step in itertools.islice(itertools.zip_longest(*rests), n_steps):
            batch = [x for x in step if x is not None]
            wanted = [*whole, *whole][used:used + size]
            assert batch == (wanted if program.even else wanted[:program.n - used])
            used += size
        if used >= program.n:
            break
        order, position = resumed[n_steps % size]
        before = order, position + n_steps, program.epoch, size


# --- Chainer's iterators -------------------------------------------------------------------------

KINDS = {
    'serial': iterators.SerialIterator,
    'threads': lambda *args, **options: iterators.MultithreadIterator(
        *args, n_threads=2, **options),
    'processes': lambda *args, **options: iterators.MultiprocessIterator(
        *args, n_processes=1, n_prefetch=2, **options),
}


@dataclasses.dataclass(frozen=True)
class Batches:
    """The arguments of an iterator, and the interruptions.

    Attributes:
        seed: The seed of random numbers.
        kind: The name of the iterator class.
        form: The form of the samples.
        kinds: The kinds of the values in a sample.
        n: The number of samples.
        batch_size, repeat, shuffle: Arguments of the iterator.
        runs: For each run, the number of steps before its snapshot, and after it until the job is
            killed.
        root: The rank that has the data, modulo the number of ranks.
        communicator: The name of the communicator.
    """

    seed: int
    kind: str
    form: str
    kinds: tuple
    n: int
    batch_size: int
    repeat: bool
    shuffle: bool
    runs: tuple[tuple[int, int], ...]
    root: int
    communicator: str

    def samples(self):
        draw = np.random.RandomState(self.seed)
        names = 'x', 't', 'z'
        for i in range(self.n):
            values = [make(draw, kind) for kind in self.kinds]
            yield {'tuple': tuple(values), 'list': values, 'mixed': values[i % len(values)],
                   'dict': dict(zip(names, values, strict=False)), 'alone': values[0]}[self.form]

    def create(self, samples, seed):
        options = {'shuffle': False} if not self.shuffle else {
            'order_sampler': iterators.ShuffleOrderSampler(np.random.RandomState(seed))}
        return KINDS[self.kind](samples, self.batch_size, repeat=self.repeat, **options)

    def run(self, iterator, n_steps):
        return [(next(iterator, None), progress(iterator)) for _ in range(n_steps)]


def batches(*kind_names):
    return st.builds(
        Batches, seed=seeds, kind=st.sampled_from(kind_names),
        form=st.sampled_from(['tuple', 'alone', 'mixed', 'list', 'dict']),
        kinds=st.lists(kinds, min_size=1, max_size=3).map(tuple),
        n=st.sampled_from([10, 1, 4, 25]), batch_size=st.sampled_from([3, 1, 5]),
        repeat=st.sampled_from([True, True, False]), shuffle=st.sampled_from([True, True, False]),
        runs=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2)), min_size=2, max_size=3
                      ).map(tuple), root=st.integers(0, 3), communicator=communicators)


@law(batches('threads', 'threads', 'serial', 'serial', 'processes'),
     # Plant the fault only in SerialIterator: the others draw orders in advance, at any time.
     planted(iterator_state, '_serialize_random', lambda serialize: lambda iterator, serializer: (
         isinstance(iterator, iterators.SerialIterator) or serialize(iterator, serializer))))
def test_resumed_iterators(comm, program):
    """Resumed iterators, including multi-node and synchronized ones, match uninterrupted ones."""
    wrap = [lambda each: each,
            lambda each: chainermn.iterators.create_multi_node_iterator(
                each, comm, program.root % comm.size),
            lambda each: chainermn.iterators.create_synchronized_iterator(each, comm),
            ][program.seed % (3 if program.shuffle else 2)]

    def create(seed):
        np.random.seed(seed)
        return wrap(program.create([*range(program.n)], seed))

    whole = create(0)
    state, found = saved(whole), []
    expected = program.run(whole, sum(n_steps for n_steps, _ in program.runs))
    whole.finalize()
    for n_steps, n_lost in program.runs:
        iterator = create(len(found) + 1)
        load(state, iterator)
        if n_lost == 1:  # save and load it again
            load(saved(iterator), iterator)
        found += program.run(iterator, n_steps)
        state = saved(iterator)
        program.run(iterator, n_lost)
        iterator.finalize()
    assert found == expected


@law(batches('serial', 'serial', 'serial', 'threads', 'processes'), planted(
    _MultiNodeIterator, '_own_progress', lambda progress: lambda self, **options: {
        name: np.float32(value) if isinstance(value, float) else value
        for name, value in progress(self, **options).items()}))
def test_multi_node_iterator(comm, program):
    """``create_multi_node_iterator`` gives all ranks the batches and progress of one rank."""
    # Pickling changes the byte order of reversed arrays and arrays with gaps. Chainer's processes
    # change the byte order of empty arrays.
    hypothesis.assume(not any(
        (name.startswith('>') and layout == 'reversed')
        or (program.kind == 'processes' and 0 in shape) for name, shape, layout in program.kinds))
    samples, root = [*program.samples()], program.root % comm.size
    mine = dataclasses.replace(program, kind='serial').create(samples, 0)
    expected = program.run(mine, 8)
    actual = program.create(samples, 0) if comm.rank == root else iterators.SerialIterator(
        chainermn.datasets.create_empty_dataset(samples), program.batch_size)
    iterator = chainermn.iterators.create_multi_node_iterator(actual, comm, root)
    found = program.run(iterator, 8)
    alone = dataclasses.replace(program, kind='serial').create(samples, 1)
    rest, state = program.n - iterator.current_position, saved(iterator)
    batch = next(iterator, None)
    iterator.finalize()
    assert_same(found, expected)
    if comm.rank != root and batch:  # one process can resume any rank's snapshot
        load(state, alone)
        assert_same(next(alone)[:rest], batch[:rest])
    assert all(x.flags.writeable for x in arrays_in([batch for batch, _ in found]))


@law(batches('serial', 'serial', 'threads', 'processes'), planted(
    iterators.ShuffleOrderSampler, '__init__',
    lambda init: lambda self, random_state=None: init(self)))
def test_synchronized_iterator(comm, program):
    """With ``create_synchronized_iterator``, all ranks shuffle with the seed of rank 0."""
    np.random.seed(program.seed + comm.rank)
    actual = KINDS[program.kind]([*range(program.n)], program.batch_size)
    iterator = chainermn.iterators.create_synchronized_iterator(actual, comm)
    n_steps = 3 * -(-program.n // program.batch_size)
    found = [x for _ in range(n_steps) for x in next(iterator)]
    iterator.finalize()
    np.random.seed(program.seed)
    np.random.permutation(program.n)  # drawn by the actual iterator when it was created
    draw = np.random.RandomState(np.random.randint(0, 2**32 - 1, dtype=np.uint32))
    expected = [draw.permutation(program.n) for _ in range(n_steps * program.batch_size)]
    assert found == np.concatenate(expected)[:len(found)].tolist()


# --- scatter -------------------------------------------------------------------------------------

class Bare:
    """A dataset with only the required methods."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return {'square': int(i)**2}


def pair(example):
    return example, 1


SOURCES = {
    'array': lambda n: np.arange(2 * n, dtype='f').reshape(n, 2),
    'Fortran array': lambda n: np.asfortranarray(np.arange(2. * n).reshape(n, 2)),
    'list': lambda n: [f'example {i}' for i in range(n)],
    'tuple': lambda n: tuple(range(n)), 'bare': Bare, 'range': range,
}
#: Functions of a length and of two functions that create inner datasets.
COMPOSED = {
    'TupleDataset': lambda n, a, b: datasets.TupleDataset(a(n), b(n)),
    'DictDataset': lambda n, a, b: datasets.DictDataset(x=a(n), t=b(n)),
    'ConcatenatedDataset': lambda n, a, b: datasets.ConcatenatedDataset(a(n // 3), b(n - n // 3)),
    'SubDataset': lambda n, a, b: datasets.SubDataset(a(n + 5), 3, n + 3),
    'SubDataset with order': lambda n, a, b: datasets.SubDataset(
        a(n + 5), 2, n + 2, np.random.RandomState(n).permutation(n + 5)),
    'TransformDataset': lambda n, a, b: datasets.TransformDataset(a(n), pair),
}


@dataclasses.dataclass(frozen=True)
class Scattered:
    n: int
    dataset: tuple  # a name, and the inner datasets
    shuffle: bool
    seed: int
    is_equal: bool
    root: int
    communicator: str

    def create(self, n, dataset=None):
        name, *parts = dataset or self.dataset
        return SOURCES[name](n) if name in SOURCES else COMPOSED[name](
            n, *(lambda k, part=part: self.create(k, part) for part in parts))


scattered = st.builds(
    Scattered, n=st.sampled_from([11, 13, 0, 1, 2, 5, 7, 12, 60]), shuffle=st.booleans(),
    seed=st.sampled_from([0, 7, 2**32 - 1]), is_equal=st.booleans(), root=st.integers(0, 3),
    communicator=communicators,
    dataset=st.recursive(st.tuples(st.sampled_from([*SOURCES])), lambda inner: st.tuples(
        st.sampled_from([*COMPOSED]), inner, inner), max_leaves=4))


@law(scattered, planted(scatter, '_plan', lambda plan: (
    lambda dataset, size, shuffle, seed, *others: plan(
        dataset, size, shuffle, seed or None, *others))), examples=12)
def test_scattered(comm, program):
    """``scatter_dataset`` and ``scatter_index`` give shards of the same length, or a partition."""
    n, size, root = program.n, comm.size, program.root % comm.size
    whole, options = program.create(n), {'force_equal_length': program.is_equal}
    part = chainermn.scatter_dataset(
        whole if comm.rank == root else None, comm, root, program.shuffle, program.seed, **options)
    index = chainermn.scatter_index(n if comm.rank == root else None, comm, root, **options)
    every = comm.allgather_obj(index)
    order = np.random.RandomState(program.seed).permutation(n).tolist() if program.shuffle else [
        *range(n)]
    if program.is_equal:
        assert every == [(n * rank // size, n * rank // size + -(-n // size))
                         for rank in range(size)]
    else:
        assert [i for begin, end in every for i in range(begin, end)] == [*range(n)]
        lengths = [end - begin for begin, end in every]
        assert sorted(lengths, reverse=True) == lengths and lengths[0] - lengths[-1] <= 1
    expected = [whole[i] for i in order[slice(*index)]]
    assert len(part) == len(expected)
    assert_same([part[i] for i in range(len(part))], expected)
    assert_same([part[i - len(part)] for i in range(len(part))], expected)
    assert_same([*part[1::2]], expected[1::2])
    with pytest.raises(IndexError):
        part[len(part)]
