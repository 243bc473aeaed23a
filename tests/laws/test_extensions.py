"""Laws of extensions: N ranks report the same as one process with all examples."""

import functools
from itertools import zip_longest

import chainer
import numpy as np
import pytest
from chainer.training import extensions
from hypothesis import strategies as st
from laws.law import law, planted

import chainermn
from chainermn.extensions import (
    _generic_multi_node_evaluator,
    linear_scaling,
    multi_node_evaluator,
    observation_aggregator,
)
from chainermn.extensions._epoch_length import count_samples
from chainermn.extensions.allreduce_persistent import AllreducePersistent
from chainermn.iterators import (
    MultiNodeOrderSampler,
    ShardedIterator,
    create_multi_node_iterator,
    create_synchronized_iterator,
)

pytestmark = pytest.mark.mpi(min_size=2)

#: Numbers of examples, and whether a rank reports a value; the ranks use them in turn.
COUNTS = st.lists(st.integers(0, 7), min_size=1, max_size=5)
MASKS = st.lists(st.booleans(), min_size=1, max_size=7)


class Model(chainer.Link):
    """Reports the mean of a batch."""

    def forward(self, x):
        chainer.report({'value': x.mean()}, self)


class NaNEvaluator(extensions.Evaluator):
    """Reports NaN if there are no examples."""

    def evaluate(self):
        return super().evaluate() or {'main/value': np.nan}


def shards(comm, counts, batch_size, is_sampled):
    """Return the examples of all ranks, and an iterator over the examples of this rank.

    If ``is_sampled``, an order sampler selects them from the examples of all ranks.
    """
    data = [np.random.RandomState(rank).randn(counts[rank % len(counts)])
            for rank in range(comm.size)]
    ends = np.cumsum([0, *map(len, data)])
    mine = np.arange(*ends[comm.rank:comm.rank + 2])
    if is_sampled:
        return data, chainer.iterators.SerialIterator(
            list(np.concatenate(data)), batch_size, repeat=False,
            order_sampler=lambda order, position: mine)
    return data, chainer.iterators.SerialIterator(
        list(data[comm.rank]), batch_size, repeat=False, shuffle=False)


@law(st.tuples(COUNTS, st.integers(1, 4), st.booleans(),
               st.sampled_from([extensions.Evaluator, NaNEvaluator])),
     planted(
    multi_node_evaluator, '_weights', lambda weights: lambda by_rank: weights(
        [(min(n, 1), keys) for n, keys in by_rank])), examples=20)
def test_evaluator(comm, program):
    """The multi-node evaluator returns the mean over the examples of all ranks."""
    counts, batch_size, is_sampled, kind = program
    # Use batches of one size, because Chainer's evaluator averages the means of the batches.
    data, iterator = shards(comm, [n * batch_size for n in counts], batch_size, is_sampled)
    evaluator = chainermn.create_multi_node_evaluator(kind(iterator, Model()), comm)
    everything = np.concatenate(data)
    for result in [evaluator() for _ in range(2)]:
        if len(everything):
            np.testing.assert_allclose(result['main/value'], everything.mean(), 1e-6)
        else:
            assert [*map(str, result.values())] == ['nan'] * (kind is NaNEvaluator)


@law(st.tuples(COUNTS, st.integers(1, 4), st.booleans(), st.integers(0, 3)),
     planted(_generic_multi_node_evaluator, 'zip_longest', lambda _: (
         lambda *rows, fillvalue: zip(*rows, strict=False))), examples=10)
def test_generic_evaluator(comm, program):
    """``GenericMultiNodeEvaluator`` gets the results of all ranks, batch by batch."""
    counts, batch_size, is_sampled, root = program
    data, iterator = shards(comm, counts, batch_size, is_sampled)
    evaluator = chainermn.extensions.GenericMultiNodeEvaluator(
        comm, iterator, lambda x: x.tolist(), root=root % comm.size)
    batches = [[x[i:i + batch_size].tolist() for i in range(0, len(x), batch_size)] for x in data]
    expected = [batch for row in zip_longest(*batches) for batch in row if batch]
    results = [evaluator() for _ in range(2)]
    assert results == [expected if comm.rank == root % comm.size else None] * 2


class Batches(chainer.training.updaters.StandardUpdater):
    """An updater that takes batches without using them."""

    def __init__(self, iterator):
        super().__init__(iterator, chainer.optimizers.SGD(0.1).setup(Model()))

    def update_core(self):
        next(self.get_iterator('main'))


KINDS = {
    'serial': chainer.iterators.SerialIterator,
    'threads': functools.partial(chainer.iterators.MultithreadIterator, n_threads=1),
    'processes': functools.partial(chainer.iterators.MultiprocessIterator, n_processes=1),
}


def third(n):
    """Return an order sampler that selects a third of the samples."""
    return lambda order, position: np.arange(n // 3)


#: Iterators over ``n`` samples of all ranks; ``create`` has the arguments of Chainer's iterators.
SPLITS = {
    'scattered': lambda comm, n, size, create: create(
        chainermn.scatter_dataset(range(n), comm), size),
    'sampler': lambda comm, n, size, create: create(
        range(n), size, order_sampler=MultiNodeOrderSampler(n, comm)),
    'sharded': lambda comm, n, size, create: ShardedIterator([range(n)], size, comm),
    'third': lambda comm, n, size, create: create(range(n), size, order_sampler=third(n)),
    'synchronized': lambda comm, n, size, create: create_synchronized_iterator(
        create(range(n), size), comm),
    'multi-node': lambda comm, n, size, create: create_multi_node_iterator(
        create(range(n), size, order_sampler=third(n)) if comm.rank == 0 else create([0], size),
        comm),
}


@pytest.mark.filterwarnings('ignore:.* multi-threaded, use of fork:DeprecationWarning')
@law(st.tuples(st.sampled_from([*SPLITS]), st.sampled_from([*KINDS]), st.integers(9, 40),
               st.integers(1, 4), st.sampled_from([0.5, 1, 2])),
     planted(linear_scaling, 'samples_per_epoch', lambda _: lambda iterator: len(iterator.dataset)))
def test_epochs(comm, program):
    """``LinearScaling`` and progress bars count the updater's epochs, for any split of the data."""
    split, kind, n, batch_size, warmup = program
    trainer = chainer.training.Trainer(
        Batches(SPLITS[split](comm, n, batch_size, KINDS[kind])), (3, 'epoch'))
    trainer.extend(chainermn.extensions.LinearScaling(
        comm, 1, warmup, decay=lambda epoch: 1 / (1 + epoch)))
    samples = count_samples(comm, trainer)

    def read(trainer):
        updater, count = trainer.updater, batch_size * comm.size
        np.testing.assert_allclose(samples * updater.epoch_detail, updater.iteration * count)
        np.testing.assert_allclose(updater.get_optimizer('main').lr, 0.1 * (
            1 + (count - 1) * min(updater.epoch_detail / warmup, 1)) / (1 + updater.epoch_detail))

    trainer.extend(read, trigger=(1, 'iteration'), priority=-1)
    trainer.run()


class Observations(chainer.training.updaters.StandardUpdater):
    """An updater that only reports: in each iteration, a random number of the rank, or none."""

    def __init__(self, comm, masks):
        iterator = chainer.iterators.SerialIterator([0] * 3, 1)
        super().__init__(iterator, chainer.optimizers.SGD().setup(Model()))
        self.comm, self.masks = comm, masks

    def value(self, iteration, rank):
        if not self.masks[(iteration * self.comm.size + rank) % len(self.masks)]:
            return None
        return np.random.RandomState([iteration, rank]).randn()

    def update_core(self):
        value = self.value(self.iteration, self.comm.rank)
        if value is not None:
            chainer.report({'value': value})

    def mean(self, begin, end):
        """Return the mean of all ranks in some iterations, or None."""
        values = [value for iteration in range(begin, end) for rank in range(self.comm.size)
                  if (value := self.value(iteration, rank)) is not None]
        return np.mean(values) if values else None


@law(st.tuples(MASKS, st.integers(1, 4)),
     planted(observation_aggregator, '_mean', lambda f: lambda values: f(values[:-1] or values)))
def test_reports(comm, program, tmp_path):
    """Aggregated values and logs average all reports of all ranks since the last aggregation."""
    masks, interval = program
    updater = Observations(comm, masks)
    trainer = chainer.training.Trainer(updater, (6, 'iteration'), out=str(tmp_path))
    trigger = (interval, 'iteration')
    trainer.extend(chainermn.extensions.ObservationAggregator(
        comm, 'value', 'mean', comm_trigger=trigger))
    trainer.extend(chainermn.extensions.create_multi_node_report(
        extensions.LogReport(['value'], trigger=trigger), comm), name='log')
    found = {}

    @trainer.extend
    def read(trainer):
        if 'mean' in trainer.observation:
            found[trainer.updater.iteration] = trainer.observation['mean']

    trainer.run()
    ends = range(interval, 7, interval)
    expected = {end: mean for end in ends
                if (mean := updater.mean(end - interval, end)) is not None}
    assert found.keys() == expected.keys()
    np.testing.assert_allclose(list(found.values()), list(expected.values()), 1e-6)
    log = {entry['iteration']: entry['value'] for entry in trainer.get_extension('log').log
           if 'value' in entry}
    assert log.keys() == expected.keys()
    np.testing.assert_allclose(list(log.values()), list(expected.values()), 1e-6)


@law(st.lists(st.tuples(st.sampled_from('efdi'), st.integers(0, 3)), min_size=1, max_size=4),
     planted(AllreducePersistent, '_average', lambda f: lambda self, arrays, dtype: f(
         self, arrays[:1], dtype)))
def test_persistent_values(comm, program):
    """``AllreducePersistent`` averages floating-point values and leaves others unchanged."""
    def values(rank):
        return [np.random.RandomState([n, rank]).randint(-9, 9, size).astype(dtype)
                for n, (dtype, size) in enumerate(program)]

    model = chainer.Link()
    for n, array in enumerate(values(comm.rank)):
        model.add_persistent(f'x{n}', array)
    AllreducePersistent(model, comm)()
    everything = [values(rank) for rank in range(comm.size)]
    for n, (dtype, _) in enumerate(program):
        mine = everything[comm.rank][n]
        mean = np.mean([arrays[n].astype('d') for arrays in everything], 0)
        found = getattr(model, f'x{n}')
        assert found.dtype == mine.dtype
        np.testing.assert_allclose(found, mine if dtype == 'i' else mean.astype(dtype), 1e-3)
