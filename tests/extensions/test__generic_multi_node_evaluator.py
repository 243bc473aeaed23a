"""Each rank computes, the root combines, whatever the numbers of batches."""
import chainer
import numpy as np
import pytest
from shared_fixtures import communicators

from chainermn.extensions import GenericMultiNodeEvaluator

comm = communicators('naive', 'version7')


class Collect(GenericMultiNodeEvaluator):
    def calc_local(self, x):
        assert not chainer.config.train
        return self._targets['main'](x)

    def aggregate(self, results):
        return list(results)


def iterator_over(values, batch_size=2):
    return chainer.iterators.SerialIterator(values, batch_size, repeat=False, shuffle=False)


def interleaved(lists):
    return [items[i] for i in range(max(map(len, lists), default=0)) for items in lists
            if i < len(items)]


@pytest.mark.parametrize('lengths, root', [('growing', 'last'), ('empty', 'first')])
def test_all_results_in_order(comm, lengths, root):
    root = 0 if root == 'first' else comm.size - 1
    length = {'growing': lambda rank: 2 * rank + 1,
              'empty': lambda rank: 0 if rank == 0 else 3}[lengths]
    values = [[100 * rank + i for i in range(length(rank))] for rank in range(comm.size)]
    expected = interleaved([[sum(v[i:i + 2]) for i in range(0, len(v), 2)] for v in values])
    evaluator = Collect(comm, iterator_over(values[comm.rank]), lambda x: int(x.sum()), root=root)
    for _ in range(2):  # the iterator is reset
        assert evaluator() == (expected if comm.rank == root else None)


@pytest.mark.parametrize('lengths', ['equal', 'uneven'])
def test_without_a_subclass_the_root_gets_what_the_target_returns(comm, lengths):
    """Here: the outputs of a model, batch by batch, in the order of the ranks."""
    model = chainer.Sequential(chainer.links.Linear(2, 3), chainer.functions.tanh)
    comm.bcast_data(model[0])
    shards = [np.random.RandomState(rank).normal(0, 1, (3 + 2 * rank * (lengths == 'uneven'), 2))
              .astype(np.float32) for rank in range(comm.size)]
    evaluator = GenericMultiNodeEvaluator(comm, iterator_over(shards[comm.rank]), model)
    results = evaluator()
    if comm.rank != 0:
        assert results is None
        return
    expected = interleaved([[model(shard[i:i + 2]).array for i in range(0, len(shard), 2)]
                            for shard in shards])
    assert len(results) == len(expected)
    for result, y in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result.array, y)


def test_the_target_gets_the_batch_as_chainers_evaluator_gives_it(comm):
    def target(*args, **kwargs):
        return [x.tolist() for x in args], {name: x.tolist() for name, x in kwargs.items()}

    for data, expected in [
        ([np.float32(1)] * 2, ([[1, 1]], {})),
        ([(np.float32(1), np.int32(2))] * 2, ([[1, 1], [2, 2]], {})),
        ([{'x': np.float32(1), 't': np.int32(2)}] * 2, ([], {'x': [1, 1], 't': [2, 2]})),
    ]:
        result = GenericMultiNodeEvaluator(comm, iterator_over(data), target)()
        assert result == ([expected] * comm.size if comm.rank == 0 else None)


def test_eval_func_is_called_instead_of_the_target(comm):
    evaluator = GenericMultiNodeEvaluator(comm, iterator_over([1, 2]), None)
    evaluator.eval_func = lambda x: int(x.sum())
    assert evaluator() == ([3] * comm.size if comm.rank == 0 else None)


def test_progress_hook_is_called_on_the_root(comm):
    batches = []
    Collect(comm, iterator_over([1, 2, 3]), lambda x: 0, progress_hook=batches.append)()
    assert batches == ([[1, 2], [3]] if comm.rank == 0 else [])


def test_reports_of_aggregate_are_logged(comm):
    class Report(Collect):
        def aggregate(self, results):
            chainer.report({'sum': sum(results)})

    observation = {}
    with chainer.Reporter().scope(observation):
        Report(comm, iterator_over([1, 2]), lambda x: int(x.sum()))()
    assert observation == ({'sum': 3 * comm.size} if comm.rank == 0 else {})


def fails(x):
    raise OSError('cannot evaluate')


@pytest.mark.parametrize('target, kind, message', [
    (fails, OSError, 'cannot evaluate'),
    (lambda x: None, ValueError, 'returned None'),
])
def test_an_error_on_one_rank_is_raised_on_all(comm, target, kind, message):
    target = target if comm.rank == comm.size - 1 else lambda x: 0
    with pytest.raises(kind, match=message):
        Collect(comm, iterator_over([1, 2, 3]), target)()
    comm.barrier()


def test_an_error_of_aggregate_is_raised_on_all(comm):
    class Broken(Collect):
        def aggregate(self, results):
            raise KeyError('bleu')

    with pytest.raises(KeyError, match='bleu'):
        Broken(comm, iterator_over([1, 2, 3]), lambda x: 0)()


def test_unknown_arguments_are_refused(comm):
    with pytest.raises(TypeError, match='foo'):
        Collect(comm, iterator_over([1]), None, foo=1)
