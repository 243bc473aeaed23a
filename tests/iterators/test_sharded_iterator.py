"""ShardedIterator: each sample once in an epoch, in an order that does not depend on the ranks."""

import collections
import copy
import gc
import itertools
import os
import random
import threading
import warnings

import chainer
import numpy as np
import pytest
from chainer.training import extensions
from each_case import each_case
from killed_jobs import make_saver
from ranks_in_threads import Alone, on_ranks
from shared_fixtures import create
from version7 import Version7Communicator

import chainermn
from chainermn.iterators import ShardedIterator

pytestmark = pytest.mark.every_size


def iterators_of(size, shards, batch_size, **options):
    return on_ranks(size, lambda comm: ShardedIterator(shards, batch_size, comm, **options))


def random_shards(rng, n_shards=200, n_samples=500):
    """Shards of consecutive numbers; some are empty."""
    lengths = [int(n_samples ** rng.random()) for _ in range(int(n_shards ** rng.random()))]
    if len(lengths) > 3:
        lengths[rng.randrange(len(lengths))] = 0
    ends = [*itertools.accumulate(lengths, initial=0)]
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]


def random_options(rng):
    return {'shuffle': rng.random() < .8, 'seed': rng.randrange(2**32),
            'buffer': rng.choice([1, 2, 8, 300]), 'n_prefetch': rng.choice([0, 0, 1, 3])}


def step(iterators):
    """One batch of each rank; ``None`` for a rank without one."""
    return [next(each, None) for each in iterators]


def finalize(iterators):
    for each in iterators:
        each.finalize()


def steps_of_epoch(iterators):
    """The batches of an epoch without repeat, by step and rank."""
    steps = [*itertools.takewhile(any, (step(iterators) for _ in itertools.count()))]
    assert all(each.epoch == each.epoch_detail == 1 for each in iterators)
    assert all(each.is_new_epoch or not len(each.dataset) for each in iterators)
    finalize(iterators)
    return steps


def check_once(counts, n):
    """Samples were taken once per epoch, and some of the current epoch once more."""
    complete = sum(counts.values()) // n
    assert min(counts[i] for i in range(n)) >= complete
    assert max(counts.values()) <= -(-sum(counts.values()) // n)


def cases(name, number):
    """Random cases: a sample of them, with --full all."""
    return pytest.mark.parametrize(name, [
        pytest.param(i, marks=[pytest.mark.full] if i else []) for i in range(number)])


@pytest.mark.mpi_skip
@cases('seed', 20)
def test_each_sample_once_in_random_cases(seed):
    """25 cases each: 1 to 7 ranks, 1 to 200 shards of 1 to 500 samples."""
    rng = random.Random(seed)
    for _ in range(25):
        shards, options = random_shards(rng), random_options(rng)
        n, size, batch_size = sum(map(len, shards)), rng.randint(1, 7), rng.randint(1, 40)
        kind = rng.choice(['endless', 'endless split', 'repeat', 'drop', 'split', None])
        per_step = size * batch_size
        if kind == 'endless split':
            check_endless_split(shards, size, batch_size, options)
            continue
        if kind == 'endless' or (kind == 'drop' and n < per_step):
            check_endless(shards, size, batch_size, options)
            continue
        iterators = iterators_of(size, shards, batch_size, repeat=False, last=kind, **options)
        lengths = [len(each.dataset) for each in iterators]
        steps = steps_of_epoch(iterators)
        counts = collections.Counter(
            x for batches in steps for batch in batches for x in batch or ())
        batch_lengths = {len(batch) for batches in steps[:-1] for batch in batches}
        assert batch_lengths <= {batch_size}
        last = [len(batch or ()) for batch in steps[-1]]
        if kind == 'repeat':
            assert {*last} == {batch_size} and set(counts) == {*range(n)}
            assert sum(counts.values()) - n == -n % per_step
        elif kind == 'drop':
            assert {*last} == {batch_size} and {*counts.values()} == {1}
            assert sum(counts.values()) == n - n % per_step == sum(lengths)
        else:
            assert counts == dict.fromkeys(range(n), 1) and max(last) - min(last) <= 1
            mine = [sum(len(batches[rank] or ()) for batches in steps) for rank in range(size)]
            assert mine == lengths


def check_endless(shards, size, batch_size, options):
    n, counts = sum(map(len, shards)), collections.Counter()
    iterators = iterators_of(size, shards, batch_size, **options)
    assert sum(max(len(each.dataset), 0) for each in iterators) in (n, max(n, size))
    taken = 0
    while taken < 3 * n:
        before = taken // n
        batches = step(iterators)
        assert {len(each) for each in batches} == {batch_size}
        taken += size * batch_size
        counts.update(itertools.chain(*batches))
        for each in iterators:
            assert (each.epoch, each.current_position) == divmod(taken, n)
            assert each.is_new_epoch == (each.epoch > before)
        if taken // n > before:
            check_once(counts, n)
    check_once(counts, n)
    finalize(iterators)


def check_endless_split(shards, size, batch_size, options):
    """Smaller batches at the end of epochs; one for each rank may be completed."""
    n, taken, counts = sum(map(len, shards)), 0, collections.Counter()
    iterators = iterators_of(size, shards, batch_size, last='split', **options)
    while taken < 3 * n:
        rest, before = n - taken % n, taken
        batches = step(iterators)
        lengths = [len(each) for each in batches]
        counts.update(itertools.chain(*batches))
        taken += sum(lengths)
        assert 1 <= min(lengths) >= max(lengths) - 1
        assert taken - before == min(size * batch_size, max(rest, size))
        assert {(each.epoch, each.current_position) for each in iterators} == {divmod(taken, n)}
        assert {each.is_new_epoch for each in iterators} == {taken // n > before // n}
        check_once(counts, n)
    finalize(iterators)


@pytest.mark.mpi_skip
@pytest.mark.parametrize('seed', [
    0, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8)]])
def test_the_number_of_ranks_does_not_change_the_global_batches(seed):
    rng = random.Random(seed)
    shards, options = random_shards(rng), random_options(rng)
    found = []
    for size, batch_size in [(4, 8), (2, 16), (1, 32), (32, 1)]:
        iterators = iterators_of(size, shards, batch_size, **options)
        found.append([sorted(itertools.chain(*step(iterators))) for _ in range(60)])
        finalize(iterators)
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.mpi_skip
@cases('seed', 20)
def test_resuming_on_other_ranks_in_random_cases(seed):
    """Ten cases each: a chain of kills, after which 1 to 7 ranks load what any rank saved."""
    rng = random.Random(seed)
    for _ in range(10):
        shards, options = random_shards(rng, 60, 100), random_options(rng)
        n, counts, saved = sum(map(len, shards)), collections.Counter(), None
        repeat, n_kills = rng.random() < .7, rng.randint(1, 3)
        options['last'] = rng.choice([None, 'split'])
        for kill in range(n_kills + 1):
            size, batch_size = rng.randint(1, 7), rng.randint(1, 30)
            iterators = iterators_of(size, shards, batch_size, repeat=repeat, **options)
            if saved is not None:
                for each in iterators:
                    chainer.serializers.NpzDeserializer(saved).load(each)
            n_steps = rng.randint(1, max(1, n // (size * batch_size)))
            if kill == n_kills and not repeat:
                n_steps = n
            for _ in range(n_steps):
                counts.update(x for batch in step(iterators) for x in batch or ())
            serializer = chainer.serializers.DictionarySerializer()
            serializer.save(rng.choice(iterators))
            saved = serializer.target
            assert all(array.size < 10 for array in saved.values())  # the position, not the order
            finalize(iterators)
        if repeat:
            check_once(counts, n)
        else:
            assert counts == dict.fromkeys(range(n), 1)


@pytest.mark.mpi_skip
@pytest.mark.parametrize('rank', range(4))
def test_resuming_after_the_last_step_of_an_epoch(rank):
    """Of 10 samples, 2 are left for 4 ranks: what any of them saved is the same position."""
    iterators = iterators_of(4, [range(10)], 2, last='split')
    counts = collections.Counter(x for _ in range(2) for batch in step(iterators) for x in batch)
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(iterators[rank])
    finalize(iterators)
    alone, = iterators_of(1, [range(10)], 1, last='split')
    chainer.serializers.NpzDeserializer(serializer.target).load(alone)
    assert alone.epoch == 1
    counts.update(x for _ in range(20 - sum(counts.values())) for x in next(alone))
    assert counts == dict.fromkeys(range(10), 2)
    alone.finalize()


def test_the_order(tmp_path):
    """It depends on seed and epoch, shards of a window are mixed, and others are not."""
    shards = [range(i * 10, i * 10 + 10) for i in range(12)]

    def epochs(**options):
        iterator = ShardedIterator(shards, 10, Alone(), **{'buffer': 3, 'n_prefetch': 0, **options})
        return [[x for _ in range(12) for x in next(iterator)] for _ in range(3)]

    first, *_ = found = epochs()
    assert found == epochs(n_prefetch=3) and first not in found[1:]
    assert epochs(seed=1)[0] != first and epochs(buffer=4)[0] != first
    assert epochs(shuffle=False) == [[*range(120)]] * 3
    for i in range(0, 120, 30):  # a window
        window = first[i:i + 30]
        assert len({x // 10 for x in window}) == 3
        assert len({x // 10 for x in window[:10]}) == 3  # mixed


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
    steps_of_epoch(iterators)
    assert max(map(len, opened)) <= 16 // size + 4


# --- with real ranks, files, and Chainer's objects -----------------------------------------------

@pytest.fixture(scope='module', params=['naive', 'version7'])
def comm(request):
    return create(request.param)


def write(comm, n=100, samples_per_shard=7, prefix='train'):
    """Each rank writes its share of n samples: a row, and its number."""
    mine = [(np.full(3, i, 'f'), np.int32(i)) for i in range(comm.rank, n, comm.size)]
    return chainermn.datasets.write_shards(mine, prefix, samples_per_shard, comm)


def train(comm, n_epochs, how, stop=None):
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
    saver = make_saver(comm, '.', how)
    trainer.extend(saver, trigger=(5, 'iteration'))
    if how == 'checkpointer':
        saver.maybe_load(trainer, optimizer)
    trainer.run()
    return used, iterator.epoch_detail


@each_case('how, sizes', [('checkpointer', (3, 1)), ('checkpointer', (1, 2)), ('snapshot', (4, 4)),
                          ('checkpointer', (2, 4)), ('checkpointer', (4, 3))])
def test_a_killed_job_continues_on_other_ranks(comm, shared_folder, how, sizes):
    """After 10 and 13 iterations the job is killed; it was saved at iteration 10."""
    if isinstance(comm, Version7Communicator):
        return
    for path in shared_folder.glob('*'):
        if comm.rank == 0:
            path.unlink()
    comm.barrier()
    write(comm)
    before, after = (min(size, comm.size) for size in sizes)
    used = run_on(comm, before, lambda group: train(group, None, how, stop=13))
    rest = run_on(comm, after, lambda group: train(group, 2, how))
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


def test_join(comm, shared_folder):
    """With last='split', ranks have different numbers of batches."""
    if isinstance(comm, Version7Communicator):
        pytest.skip('join needs its checks')
    write(comm, n=4 * comm.size + 1)
    iterator = ShardedIterator('train-*.npz', 2, comm, repeat=False, last='split')
    model = chainer.links.Linear(3, 1)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(0), comm).setup(model)
    for _ in range(3):
        used = []
        iterator.reset()
        with chainermn.join(optimizer):
            for batch in iterator:
                used += [int(t) for _, t in batch]
                x = chainer.dataset.concat_examples(batch)[0]
                optimizer.update(lambda x=x: chainer.functions.sum(model(x)))
        found = comm.allgather_obj(used)
        assert sorted(itertools.chain(*found)) == [*range(4 * comm.size + 1)]
        assert {len(each) for each in found} <= {4, 5}


def test_a_snapshot_of_other_shards_is_an_error(comm, shared_folder):
    write(comm)
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(ShardedIterator('train-*.npz', 4, comm, seed=1))
    other = ShardedIterator('train-*.npz', 4, comm, seed=2)
    with pytest.raises(ValueError, match='seed was 1, is 2'):
        chainer.serializers.NpzDeserializer(serializer.target).load(other)


@pytest.mark.parametrize('option, value, error', [
    ('batch_size', 0, 'batch_size must be an integer of at least 1'),
    ('batch_size', 2.5, 'batch_size must be'), ('seed', -1, 'seed must be'),
    ('seed', 2**32, 'less than'), ('buffer', 0, 'buffer must be'), ('last', 'some', 'last must be'),
    ('n_prefetch', -1, 'n_prefetch must be'), ('on_error', 'ignore', 'on_error must be'),
    ('shards', 'nothing-*.npz', 'no file matches'), ('shards', '.', 'Pass a pattern'),
    ('shards', [], 'is empty'), ('shards', [range(0)], 'have 0 samples'),
    ('shards', [3], 'a shard needs a length')])
def test_an_invalid_argument_on_one_rank_is_an_error_on_all(comm, option, value, error):
    arguments = {'shards': [range(10)], 'batch_size': 1}
    if comm.rank == comm.size - 1 or option == 'shards':
        arguments[option] = value
    with pytest.raises((ValueError, OSError, RuntimeError), match=error) as caught:
        ShardedIterator(comm=comm, **arguments)
    assert len(set(comm.allgather_obj(str(caught.value)))) == 1


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
