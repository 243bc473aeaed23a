"""An evaluator whose result is the mean over the examples of all ranks."""
from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import chainer

from chainermn._delegate import Delegate
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions._generic_multi_node_evaluator import GenericMultiNodeEvaluator

__all__ = ['GenericMultiNodeEvaluator', 'create_multi_node_evaluator']


def create_multi_node_evaluator(actual_evaluator: Any, communicator: CommunicatorBase) -> Any:
    r"""Makes an evaluator report means over all ranks.

    The evaluator is changed in place: from now on its ``evaluate`` is collective (every rank calls
    it), and gives on every rank the same result. Each rank evaluates what its own iterator yields;
    then for each key

    .. math::
        \text{result} = \frac{\sum_r n_r v_r}{\sum_r n_r}

    where :math:`v_r` is what rank :math:`r` alone would report (with Chainer's ``Evaluator``, the
    mean over its batches) and :math:`n_r` is the number of examples that its iterator yielded. So
    parts may have any length; a rank with an empty part, or one that does not report the key,
    does not count. If no rank drew examples from an iterator of the evaluator, because
    ``evaluate`` was overridden to do without one, all ranks weigh the same. NaN stays NaN.

    An exception in ``evaluate`` of one rank is raised on all ranks.

    Args:
        actual_evaluator: Evaluator, such as :class:`chainer.training.extensions.Evaluator`, or any
            object whose ``evaluate()`` returns a dict of numbers or arrays.
        communicator: ChainerMN communicator.

    Returns:
        ``actual_evaluator`` itself. Its former ``evaluate`` is at ``_mn_original_evaluate``, and
        ``communicator`` at ``_mn_communicator``.

    Raises:
        TypeError: If ``actual_evaluator`` has no ``evaluate``, or ``communicator`` is not a
            communicator.
    """
    if not isinstance(communicator, CommunicatorBase):
        raise TypeError('create_multi_node_evaluator needs a ChainerMN communicator as its second '
                        f'argument, got {communicator!r}. '
                        'Make one with chainermn.create_communicator().')
    original_evaluate = getattr(actual_evaluator, 'evaluate', None)
    if not callable(original_evaluate):
        communicator.refuse('create_multi_node_evaluator', TypeError(
            'create_multi_node_evaluator needs an evaluator as its first argument, got '
            f'{actual_evaluator!r}.'))

    def evaluate() -> dict[str, Any]:
        counts: list[int] = []
        try:
            with _counted_iterators(actual_evaluator, counts):
                observation = {key: _to_host(value)
                               for key, value in original_evaluate().items()}
        except Exception as error:
            communicator.refuse('evaluate', error)
        return _weighted_means(communicator.allgather_obj((sum(counts), observation)))

    actual_evaluator._mn_original_evaluate = original_evaluate
    actual_evaluator._mn_communicator = communicator
    actual_evaluator.evaluate = evaluate
    return actual_evaluator


class _CountingIterator(Delegate, wraps='iterator'):
    """Appends the length of every batch to ``counts``.

    Ends at once over an empty data set, where Chainer's iterators divide by zero.
    """

    iterator: Any
    counts: list[int]

    def __init__(self, iterator: Any, counts: list[int]) -> None:
        super().__init__(iterator)
        self.counts = counts

    def __iter__(self) -> _CountingIterator:
        return self

    def __next__(self) -> Any:
        if len(getattr(self.iterator, 'dataset', [()])) == 0:
            raise StopIteration
        batch = next(self.iterator)
        self.counts.append(len(batch) if hasattr(batch, '__len__') else 1)
        return batch

    next = __next__

    def __copy__(self) -> _CountingIterator:
        # Evaluators written for old Chainer copy their iterator instead of resetting it.
        return _CountingIterator(copy.copy(self.iterator), self.counts)


@contextlib.contextmanager
def _counted_iterators(evaluator: Any, counts: list[int]) -> Iterator[None]:
    iterators = getattr(evaluator, '_iterators', None)
    if iterators is None:  # not derived from Chainer's Evaluator
        yield
        return
    evaluator._iterators = {name: _CountingIterator(iterator, counts)
                            for name, iterator in iterators.items()}
    try:
        yield
    finally:
        evaluator._iterators = iterators


def _to_host(value: Any) -> Any:
    """GPU arrays would be received on device 0 by all ranks of a node."""
    if isinstance(value, chainer.Variable):
        value = value.array
    if isinstance(value, chainer.get_array_types()):
        return chainer.get_device('@numpy').send(value)
    return value


def _weighted_means(ranks: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Means over the ranks of what they reported, by key; a pure function of ``ranks``."""
    means = {}
    for key in sorted({key for _, observation in ranks for key in observation}):
        reports = [(n, observation[key]) for n, observation in ranks if key in observation]
        total = sum(n for n, _ in reports)
        if total == 0:  # no iterator was used, or all parts are empty
            reports, total = [(1, value) for _, value in reports], len(reports)
        # A rank with an empty part may report NaN, and 0 times NaN would be NaN.
        means[key] = sum(value * (n / total) for n, value in reports if n > 0)
    return means
