"""ShardedIterator: each sample once in an epoch, in an order that does not depend on the ranks."""

import collections
import copy
import itertools
import random
import threading

import chainer
import numpy as np
import pytest
from chainer.training import extensions
from shared_fixtures import create

import chainermn
from chainermn.iterators import ShardedIterator

pytestmark = pytest.mark.every_size


class Rank:
    """A rank of a job in threads: what third parties' communicators have, for constructors."""

    def __init__(self, rank, size, barrier, values):
        self.rank, self.size = rank, size
        self._barrier, self._values = barrier, values

    def allgather_obj(self, x):
        self._values[self.rank] = x
        self._barrier.wait()
        found = [*self._values]
        self._barrier.wait()
        return found


def on_ranks(size, make):
    """Return what a function creates on each rank of a simulated job."""
    barrier, values, made = threading.Barrier(size), [None] * size, [None] * size

    def run(rank):
        made[rank] = make(Rank(rank, size, barrier, values))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return made


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
@cases('tenth', 10)
def test_each_sample_once_in_random_cases(tenth):
    """Fifty cases each: 1 to 7 ranks, 1 to 200 shards of 1 to 500 samples."""
    rng = random.Random(tenth)
    for _ in range(50):
        shards, options = random_shards(rng), random_options(rng)
        n, size, batch_size = sum(map(len, shards)), rng.randint(1, 7), rng.randint(1, 40)
        kind = rng.choice(['endless', 'repeat', 'drop', 'split', None])
        per_step = size * batch_size
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


@pytest.mark.mpi_skip
@pytest.mark.parametrize('seed', range(8))
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
@cases('tenth', 10)
def test_resuming_on_other_ranks_in_random_cases(tenth):
    """Twenty cases each: a chain of kills, after which 1 to 7 ranks load what any rank saved."""
    rng = random.Random(tenth)
    for _ in range(20):
        shards, options = random_shards(rng, 60, 100), random_options(rng)
        n, counts, saved = sum(map(len, shards)), collections.Counter(), None
        repeat, n_kills = rng.random() < .7, rng.randint(1, 3)
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


def test_the_order(tmp_path):
    """It depends on seed and epoch, shards of a window are mixed, and others are not."""
    alone = on_ranks(1, lambda comm: comm)[0]
    shards = [range(i * 10, i * 10 + 10) for i in range(12)]

    def epochs(**options):
        iterator = ShardedIterator(shards, 10, alone, **{'buffer': 3, 'n_prefetch': 0, **options})
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
