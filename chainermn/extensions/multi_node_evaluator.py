"""create_multi_node_evaluator: an evaluator that reports means over all ranks."""
from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import chainer
from chainer.training.extensions import Evaluator

from chainermn._operations.on_all_ranks import raise_on_all_ranks, raise_together
from chainermn._operations.ranks import ranks_text
from chainermn._process.program_place import program_place
from chainermn._types import Array, Object
from chainermn.communicators._recognize import as_communicator, overrides
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions._epoch_length import is_empty
from chainermn.extensions._generic_multi_node_evaluator import (
    GenericMultiNodeEvaluator,
    check_ends,
)
from chainermn.extensions._observation import Value, to_host
from chainermn.extensions._replica_check import Digests, ReplicaCheck
from chainermn.optimizers._delegate import Delegate

__all__ = ['GenericMultiNodeEvaluator', 'create_multi_node_evaluator']


class _Evaluator(Protocol):
    """An evaluator, such as ``chainer.training.extensions.Evaluator``."""

    def evaluate(self) -> Mapping[str, float | Array]: ...


_E = TypeVar('_E', bound=_Evaluator)


def create_multi_node_evaluator(actual_evaluator: _E, communicator: CommunicatorBase, *,
                                allow_different_models: bool = False) -> _E:
    """Make an evaluator return means over all ranks.

    The evaluator is changed in place: its ``evaluate`` becomes collective (every rank calls it) and
    returns the same result on every rank. Each rank evaluates the batches of its own iterator. The
    result for each key is the weighted mean ``sum(n * v) / sum(n)`` over all ranks, where ``v`` is
    the value of a rank alone (with Chainer's ``Evaluator``, the mean over its batches) and ``n`` is
    the number of examples of its iterator. So shards may have any length. Ranks with an empty
    shard, or without the key, do not count. If no rank uses an iterator of the evaluator, because
    ``evaluate`` is overridden, all ranks have the same weight. If any of these values is NaN, the
    result is NaN.

    An exception in ``evaluate`` on one rank is raised on all ranks. A TypeError is raised on all
    ranks if ``evaluate`` returns anything other than a dict of numbers.

    Args:
        actual_evaluator: Evaluator, such as :class:`chainer.training.extensions.Evaluator`, or any
            object whose ``evaluate()`` returns a dict of numbers or arrays.
        communicator: ChainerMN communicator.
        allow_different_models: Whether the ranks may evaluate different models. Otherwise, rank 0
            warns once if the parameters of the evaluator's targets differ between ranks, for
            example because :func:`chainermn.create_multi_node_optimizer` was not used. Models are
            not compared if they have different layers, or if user code calls operations itself
            between evaluations, as in model parallelism.

    Returns:
        ``actual_evaluator``. Its attribute ``_mn_original_evaluate`` is the original ``evaluate``,
        and ``_mn_communicator`` is ``communicator``.

    Raises:
        TypeError: If ``actual_evaluator`` has no ``evaluate``, or ``communicator`` is not a
            communicator.
        ValueError: If an iterator of the evaluator repeats its dataset.

    Example:
        >>> iterator = chainer.iterators.SerialIterator(train, 2, repeat=False, shuffle=False)
        >>> evaluator = chainer.training.extensions.Evaluator(iterator, model)
        >>> evaluator = chainermn.create_multi_node_evaluator(evaluator, comm)
        >>> trainer.extend(evaluator)
        >>> sorted(evaluator())
        ['validation/main/accuracy', 'validation/main/loss']
    """
    communicator = as_communicator(
        communicator, 'create_multi_node_evaluator(actual_evaluator, communicator)')
    original_evaluate = getattr(actual_evaluator, 'evaluate', None)
    if not callable(original_evaluate):
        communicator.refuse('create_multi_node_evaluator', TypeError(
            'create_multi_node_evaluator needs an evaluator as its first argument, not '
            f'{type(actual_evaluator).__name__}. An evaluator has a method evaluate() that returns '
            'a dict of numbers.'))
    with raise_on_all_ranks(communicator, 'create_multi_node_evaluator'):
        _check_ends(actual_evaluator)

    check = ReplicaCheck(
        communicator, 'create_multi_node_evaluator', not allow_different_models)
    names = _NameCheck()

    def evaluate() -> dict[str, Value]:
        counts: list[int] = []
        with raise_together(communicator, 'evaluate'), \
                _counted_iterators(actual_evaluator, counts):
            observation = _checked(original_evaluate())
            digests = check.digests(getattr(actual_evaluator, '_targets', {}))
        is_reduced = overrides(communicator, 'allreduce_obj')
        sent: dict[str, Value] = {key: 0. for key in observation} if is_reduced else observation
        with communicator.called_by('create_multi_node_evaluator'):
            by_rank = communicator.allgather_obj((sum(counts), sent, digests))
            if not communicator.rank:
                check.compare([each for _, _, each in by_rank])
                names.compare([keys for _, keys, _ in by_rank])
            if is_reduced:
                return _reduced(communicator, by_rank, observation)
        return _weighted_means(by_rank)

    evaluator: Any = actual_evaluator
    evaluator._mn_original_evaluate = original_evaluate
    evaluator._mn_communicator = communicator
    evaluator.evaluate = evaluate
    return actual_evaluator


class _NameCheck:
    """Warns once if ranks report a metric under different names, such as with and without a prefix.

    Each mean would then cover only some of the ranks. Keys may differ between ranks in other ways,
    for example in model parallelism.

    Create the object in the function that user code calls, so that the warning shows that line.
    """

    def __init__(self) -> None:
        self._place = program_place()
        self._has_warned = False

    def compare(self, by_rank: Sequence[Collection[str]]) -> None:
        """Compare the keys of all ranks."""
        if self._has_warned or len({frozenset(keys) for keys in by_rank}) == 1:
            return
        reporting = {rank for rank, keys in enumerate(by_rank) if keys}
        ranks = {key: {rank for rank in reporting if key in by_rank[rank]}
                 for key in sorted(set().union(*by_rank), key=str)}
        for longer, short in itertools.permutations(ranks, 2):
            if str(longer).endswith(f'/{short}') and not ranks[longer] & ranks[short] and (
                    ranks[longer] | ranks[short] == reporting):
                self._has_warned = True
                warnings.warn_explicit('\n'.join([
                    'create_multi_node_evaluator: ranks report the same metric under different '
                    'names, so each mean covers only some of the ranks',
                    *sorted(f'  {ranks_text(sorted(ranks[key]))}: {key!r}'
                             for key in (longer, short)),
                    'Use one name on all ranks: call chainer.report(values, observer) with the '
                    'same observer.']), RuntimeWarning, *self._place)
                return


def _check_ends(evaluator: Any) -> None:
    """Raise ValueError if an evaluation would never end."""
    if getattr(evaluator.evaluate, '__func__', None) is not Evaluator.evaluate:
        return  # a custom evaluate() may stop after some batches
    for name, iterator in evaluator._iterators.items():
        check_ends(iterator, name)


def _checked(observation: Object) -> dict[str, Value]:
    """Check that the result of an evaluator has numbers; return it with values in host memory."""
    if not isinstance(observation, Mapping):
        raise TypeError("evaluate() must return a dict of numbers, such as {'loss': 0.5}, not "
                        f'{observation!r}')
    values = {key: to_host(value) for key, value in observation.items()}
    for key, value in values.items():
        if isinstance(value, (type(None), str, bytes, list, tuple, dict, set)) or getattr(
                getattr(value, 'dtype', None), 'kind', 'f') in 'OSU':
            raise TypeError(f'evaluate() must return numbers or arrays of numbers, but the value '
                            f'of {key!r} is {value!r}')
    return values


class _CountingIterator(Delegate, wraps='iterator'):
    """Appends the length of every batch to ``counts``.

    It stops immediately if there are no samples, because Chainer's iterators would divide by zero.
    """

    iterator: chainer.dataset.Iterator
    counts: list[int]

    def __init__(self, iterator: chainer.dataset.Iterator, counts: list[int]) -> None:
        super().__init__(iterator)
        self.counts = counts

    def __iter__(self) -> _CountingIterator:
        return self

    def __next__(self) -> Any:  # a batch of any type
        if is_empty(self.iterator):
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
    """Count the examples of the iterators of a Chainer evaluator."""
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


def _weighted_means(by_rank: Sequence[tuple[int, dict[str, Value], Digests]]) -> dict[str, Value]:
    """Return the mean for each key over the ranks, weighted by their numbers of examples."""
    weights = _weights(by_rank)
    # A rank with an empty shard may report NaN, and 0 times NaN would be NaN.
    return {key: sum(by_rank[rank][1][key] * weight for rank, weight in weights[key].items())
            for key in weights}


def _reduced(comm: CommunicatorBase, by_rank: Sequence[tuple[int, Collection[str], Digests]],
             observation: dict[str, Value]) -> dict[str, Value]:
    """Return the same means, using one ``allreduce_obj`` for each key as in ChainerMN 7."""
    weights = _weights(by_rank)
    return {key: comm.allreduce_obj(
        observation[key] * weights[key][comm.rank] if comm.rank in weights[key] else 0.)
            for key in weights}


def _weights(by_rank: Sequence[tuple[int, Collection[str], Digests]]
             ) -> dict[str, dict[int, float]]:
    """Return the weights of all ranks that count for each key, sorted by key."""
    weights = {}
    for key in sorted({key for _, keys, _ in by_rank for key in keys}, key=str):
        counts = {rank: n for rank, (n, keys, _) in enumerate(by_rank) if key in keys}
        if not any(counts.values()):  # no iterator was used, or all shards are empty
            counts = dict.fromkeys(counts, 1)
        total = sum(counts.values())
        weights[key] = {rank: n / total for rank, n in counts.items() if n > 0}
    return weights
