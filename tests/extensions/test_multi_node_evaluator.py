"""The multi-node evaluator: the mean over the examples of all ranks."""

import contextlib
import copy

import chainer
import numpy as np
import pytest
from chainer.iterators import MultithreadIterator, SerialIterator
from chainer.training.extensions import Evaluator
from each_case import each_case
from shared_fixtures import communicators, raises_on_all

import chainermn
from chainermn._operations import table
from chainermn.extensions import GenericMultiNodeEvaluator, create_multi_node_evaluator

pytestmark = pytest.mark.every_size

KEY = 'main/value'

comm = communicators('naive', 'version7')


class Model(chainer.Link):
    """Reports the mean of a batch."""

    def forward(self, x):
        chainer.report({'value': x.mean()}, self)


def make(comm, examples, batch_size=4, cls=Evaluator):
    model = Model()
    iterator = SerialIterator(examples, batch_size, repeat=False, shuffle=False)
    return create_multi_node_evaluator(cls(iterator, model), comm)


def values(rank, n):
    return list(np.random.RandomState(rank).normal(size=n))


def test_is_patched_in_place(comm):
    evaluator = Evaluator(SerialIterator([1.0], 1, repeat=False), Model())
    original = evaluator.evaluate
    assert create_multi_node_evaluator(evaluator, comm) is evaluator
    assert evaluator._mn_communicator is comm
    assert evaluator._mn_original_evaluate == original
    assert evaluator.evaluate != original
    assert chainermn.create_multi_node_evaluator is create_multi_node_evaluator


def test_reports_to_the_current_reporter(comm):
    evaluator = make(comm, [float(comm.rank)])
    evaluator.name = 'val'
    reporter = chainer.Reporter()
    with reporter:
        evaluator()
    assert reporter.observation == {'val/' + KEY: pytest.approx((comm.size - 1) / 2)}


def test_batches_of_one_rank(comm):
    """The other ranks have an iterator without examples."""
    def iterator():
        examples = [1., 2., 6.] if comm.rank == 0 else []
        return chainermn.iterators.create_multi_node_iterator(
            SerialIterator(examples, 1, repeat=False, shuffle=False), comm)

    evaluator = create_multi_node_evaluator(Evaluator(iterator(), Model()), comm)
    assert evaluator() == {KEY: pytest.approx(3)}
    evaluator = GenericMultiNodeEvaluator(comm, iterator(), lambda x: float(x[0]))
    evaluator.aggregate = sorted
    assert evaluator() == ([1.] * comm.size + [2.] * comm.size + [6.] * comm.size
                           if comm.rank == 0 else None)


def test_nan_stays_nan(comm):
    examples = [1.0, float('nan')] if comm.rank == comm.size - 1 else [1.0]
    assert np.isnan(make(comm, examples)()[KEY])


class Custom(Evaluator):
    """Evaluates without its iterator."""

    result = None

    def evaluate(self):
        return self.result


def test_without_an_iterator_ranks_weigh_the_same(comm):
    evaluator = make(comm, values(0, comm.rank), cls=Custom)
    evaluator.result = {'mAP': comm.rank, 'per class': np.array([1.0, comm.rank]),
                        'variable': chainer.Variable(np.array(float(comm.rank)))}
    mean = (comm.size - 1) / 2
    result = evaluator.evaluate()
    assert result['mAP'] == pytest.approx(mean)
    np.testing.assert_allclose(result['per class'], [1, mean])
    assert not isinstance(result['variable'], chainer.Variable)
    assert float(result['variable']) == pytest.approx(mean)


def test_a_key_counts_where_it_is_reported(comm):
    evaluator = make(comm, [], cls=Custom)
    evaluator.result = {'all': 1.0} | ({'last': 5.0} if comm.rank == comm.size - 1 else {})
    result = evaluator.evaluate()
    assert result == {'all': pytest.approx(1), 'last': pytest.approx(5)}
    assert list(result) == ['all', 'last']


@pytest.mark.mpi(min_size=2)
def test_a_metric_under_different_names_is_a_warning(comm):
    evaluator = make(comm, [], cls=Custom)
    evaluator.result = {'main/accuracy' if comm.rank else 'accuracy': 1.}
    others = 'rank 1' if comm.size == 2 else f'ranks 1-{comm.size - 1}'
    with pytest.warns(RuntimeWarning) if comm.rank == 0 else contextlib.nullcontext() as caught:
        assert evaluator.evaluate().keys() == {'main/accuracy', 'accuracy'}
    if comm.rank == 0:
        text = str(caught[0].message)
        assert f"\n  rank 0: 'accuracy'\n  {others}: 'main/accuracy'\n" in text, text
        assert caught[0].filename == __file__
    evaluator.evaluate()  # once


@each_case('result', [
    lambda rank: {'accuracy': 1., 'main/accuracy': 1.},
    lambda rank: {'main/accuracy': 1.} | ({} if rank else {'accuracy': 1.}),
    lambda rank: {f'accuracy of rank {rank}': 1.},
    lambda rank: {'main/loss' if rank else 'main/accuracy': 1.},
    lambda rank: {'encoder/loss' if rank else 'decoder/loss': 1.},
    lambda rank: {'main/2accuracy' if rank else 'accuracy': 1.},
    lambda rank: {} if rank else {'accuracy': 1., 'main/accuracy': 1.},
    lambda rank: {'a' if rank else 1: 1.},
])
def test_other_keys_may_differ(comm, result):
    evaluator = make(comm, [], cls=Custom)
    evaluator.result = result(comm.rank)
    evaluator.evaluate()  # warnings are errors


class OldStyle(Evaluator):
    """Copies its iterator, counts with its own summary, and reports for empty parts too."""

    def evaluate(self):
        seen = [x for batch in copy.copy(self.get_iterator('main')) for x in batch]
        return {'total': float(np.sum(seen)) / max(len(seen), 1), 'nan': np.mean(seen or [np.nan])}


def test_an_evaluator_that_copies_its_iterator(comm):
    counts = [*range(1, comm.size), 0] if comm.size > 1 else [1]  # the last rank has nothing
    evaluator = make(comm, values(comm.rank, counts[comm.rank]), cls=OldStyle)
    everything = np.concatenate([values(rank, n) for rank, n in enumerate(counts)])
    for _ in range(2):
        result = evaluator.evaluate()
        assert result['total'] == pytest.approx(everything.mean(), rel=1e-12)
        assert result['nan'] == pytest.approx(everything.mean(), rel=1e-12)


def test_an_object_that_is_no_evaluator_of_chainers(comm):
    class Plain:
        def evaluate(self):
            return {'rank': comm.rank}

    evaluator = create_multi_node_evaluator(Plain(), comm)
    assert evaluator.evaluate() == {'rank': pytest.approx((comm.size - 1) / 2)}


@pytest.mark.compares_calls
def test_one_exchange_for_all_keys(comm, monkeypatch):
    called = []

    def recorded(name, method):
        return lambda *args, **kwargs: called.append(name) or method(*args, **kwargs)

    for name in table.collectives():
        monkeypatch.setattr(comm, name, recorded(name, getattr(comm, name)))
    evaluator = make(comm, [], cls=Custom)
    evaluator.result = {str(i): i for i in range(10)}
    evaluator.evaluate()
    assert called == ['allgather_obj']


@pytest.mark.parametrize('where', ['one rank', 'all ranks'])
def test_an_error_on_one_rank_is_raised_on_all(comm, where):
    class Broken(Model):
        def forward(self, x):
            if where == 'all ranks' or comm.rank == comm.size - 1:
                raise KeyError('no such label')
            super().forward(x)

    iterator = SerialIterator(values(0, 4), 2, repeat=False)
    evaluator = create_multi_node_evaluator(Evaluator(iterator, Broken()), comm)
    with raises_on_all(KeyError, match='no such label'):
        evaluator()
    assert evaluator.get_iterator('main') is iterator


@pytest.mark.parametrize('result', [None, pytest.param(
    {'f': lambda: 0}, marks=pytest.mark.compares_calls)], ids=['None', 'not picklable'])
def test_a_bad_result_on_one_rank_is_raised_on_all(comm, result):
    evaluator = make(comm, [], cls=Custom)
    evaluator.result = result if comm.rank == 0 else {'f': 1.0}
    if comm.size == 1 and result is not None:
        pytest.skip('one rank need not pickle')
    with raises_on_all(Exception):
        evaluator.evaluate()


class FirstBatch(Evaluator):
    def evaluate(self):
        return {'first': float(next(self._iterators['main'])[0])}


@pytest.mark.filterwarnings('ignore:The .repeat. property')
def test_a_repeating_iterator_would_not_end(comm):
    """Also in GenericMultiNodeEvaluator. An ``evaluate`` of the program may stop itself."""
    for create in (
            lambda: create_multi_node_evaluator(
                Evaluator(SerialIterator([1.0], 1), Model()), comm),
            lambda: create_multi_node_evaluator(Evaluator({
                'main': SerialIterator([1.0], 1, repeat=False),
                'other': MultithreadIterator([1.0], 1)}, Model()), comm),
            lambda: GenericMultiNodeEvaluator(comm, SerialIterator([1.0], 1), Model())):
        with pytest.raises(ValueError, match=r'would not end\. Create it with '):
            create()
    evaluator = FirstBatch(SerialIterator([1.0], 1), Model())
    assert create_multi_node_evaluator(evaluator, comm).evaluate() == {'first': 1.}
