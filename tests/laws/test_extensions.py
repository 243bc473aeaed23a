"""Laws of extensions: N ranks report the same as one process with all examples."""

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
    multi_node_evaluator,
    observation_aggregator,
)
from chainermn.extensions.allreduce_persistent import AllreducePersistent

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


def shards(comm, counts, batch_size):
    """Return the examples of all ranks, and an iterator over the examples of this rank."""
    data = [np.random.RandomState(rank).randn(counts[rank % len(counts)])
            for rank in range(comm.size)]
    return data, chainer.iterators.SerialIterator(
        list(data[comm.rank]), batch_size, repeat=False, shuffle=False)


@law(st.tuples(COUNTS, st.integers(1, 4), st.sampled_from([extensions.Evaluator, NaNEvaluator])),
     planted(
    multi_node_evaluator, '_weights', lambda weights: lambda by_rank: weights(
        [(min(n, 1), keys) for n, keys in by_rank])), examples=20)
def test_evaluator(comm, program):
    """The multi-node evaluator returns the mean over the examples of all ranks."""
    counts, batch_size, kind = program
    # Use batches of one size, because Chainer's evaluator averages the means of the batches.
    data, iterator = shards(comm, [n * batch_size for n in counts], batch_size)
    evaluator = chainermn.create_multi_node_evaluator(kind(iterator, Model()), comm)
    everything = np.concatenate(data)
    for result in [evaluator() for _ in range(2)]:
        if len(everything):
            np.testing.assert_allclose(result['main/value'], everything.mean(), 1e-6)
        else:
            assert [*map(str, result.values())] == ['nan'] * (kind is NaNEvaluator)


@law(st.tuples(COUNTS, st.integers(1, 4), st.integers(0, 3)),
     planted(_generic_multi_node_evaluator, 'zip_longest', lambda _: (
         lambda *rows, fillvalue: zip(*rows, strict=False))), examples=10)
def test_generic_evaluator(comm, program):
    """``GenericMultiNodeEvaluator`` gets the results of all ranks, batch by batch."""
    counts, batch_size, root = program
    data, iterator = shards(comm, counts, batch_size)
    evaluator = chainermn.extensions.GenericMultiNodeEvaluator(
        comm, iterator, lambda x: x.tolist(), root=root % comm.size)
    batches = [[x[i:i + batch_size].tolist() for i in range(0, len(x), batch_size)] for x in data]
    expected = [batch for row in zip_longest(*batches) for batch in row if batch]
    results = [evaluator() for _ in range(2)]
    assert results == [expected if comm.rank == root % comm.size else None] * 2


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
