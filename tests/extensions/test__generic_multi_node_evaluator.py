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
