"""GenericMultiNodeEvaluator: each rank evaluates its batches; one rank combines the results."""
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import chainer

from chainermn._operations.on_all_ranks import raise_on_all_ranks, raise_together
from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions._epoch_length import is_empty
from chainermn.extensions._replica_check import ReplicaCheck

_NOTHING = object()


def check_ends(iterator: Any, name: str) -> None:
    """Check that an iterator of Chainer or ChainerMN does not repeat its dataset.

    Raises:
        ValueError: If it does.
    """
    kind = type(iterator)
    repeats = getattr(iterator, 'repeat', False) or getattr(iterator, '_repeat', False)
    if repeats and kind.__module__.startswith(('chainer.iterators.', 'chainermn.iterators.')):
        raise ValueError(
            f'the iterator {name!r} of the evaluator repeats its dataset, so the evaluation would '
            f'not end. Create it with {kind.__name__}(..., repeat=False).')


class GenericMultiNodeEvaluator(chainer.training.Extension):
    """An evaluator for metrics that are not means over batches, such as BLEU or F1.

    Every rank calls :meth:`calc_local` for each of its batches. The root gathers all results and
    calls :meth:`aggregate`. Collective: every rank runs the extension; the numbers of batches may
    differ. The results are gathered only once, so if a rank raises an error, the other ranks raise
    it after their last batches.

    By default, ``calc_local`` calls the target, and ``aggregate`` returns all results. Override the
    two methods to compute something else.

    Args:
        comm: ChainerMN communicator.
        iterator: Iterator of this rank, with ``repeat=False``.
        target: Function that ``calc_local`` calls, such as a model; ``self._targets['main']``.
        device: Device to which the converter sends the batches.
        converter: Function that converts a batch to the arguments of ``calc_local``.
        root: Rank that aggregates; the same on all ranks.
        progress_hook: Function that the root calls with each batch after its evaluation.
        allow_different_models: See :func:`chainermn.create_multi_node_evaluator`. Here, the root
            warns.

    Raises:
        ValueError: If the iterator repeats its dataset.

    Example:
        >>> class LongestInput(chainermn.extensions.GenericMultiNodeEvaluator):
        ...     def calc_local(self, xs, ts):
        ...         return float(F.sum(xs ** 2).array)
        ...     def aggregate(self, results):
        ...         chainer.report({'validation/longest': max(results)})
        >>> iterator = chainer.iterators.SerialIterator(train, 2, repeat=False, shuffle=False)
        >>> trainer.extend(LongestInput(comm, iterator, model))
        >>> trainer.run()
    """

    trigger: tuple[int, str] = (1, 'epoch')
    default_name = 'validation'
    priority: int = chainer.training.extension.PRIORITY_WRITER
    name: str | None = None

    #: Function that :meth:`calc_local` calls instead of the target.
    eval_func: Callable[..., Any] | None = None

    def __init__(self, comm: CommunicatorBase, iterator: chainer.dataset.Iterator,
                 target: Callable[..., Any], device: chainer.backend.Device | None = None,
                 converter: Callable[..., Any] = chainer.dataset.concat_examples, root: int = 0,
                 *, allow_different_models: bool = False,
                 **kwargs: Callable[[Any], object] | None) -> None:
        self._progress_hook = kwargs.pop('progress_hook', None)
        if kwargs:
            raise TypeError(f'{type(self).__name__} got unexpected keyword arguments '
                            f'{sorted(kwargs)}')
        self.comm = as_communicator(comm, type(self).__name__)
        if type(self).__call__ is GenericMultiNodeEvaluator.__call__:
            with raise_on_all_ranks(self.comm, type(self).__name__):
                check_ends(iterator, 'main')
        self.iterator = iterator
        self._targets = {'main': target}
        self.converter = converter
        self.device = device
        self.root = root
        self._replica_check = ReplicaCheck(self.comm, type(self).__name__,
                                           not allow_different_models)

    def calc_local(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch.

        By default, this calls ``eval_func``, or the target if that is ``None``.

        Args:
            args: The converted batch, passed as keyword arguments if the converter returned a dict.

        Returns:
            Any picklable object, except ``None``.

        Example:
            >>> class Predictions(chainermn.extensions.GenericMultiNodeEvaluator):
            ...     def calc_local(self, xs, ts):
            ...         return model.predictor(xs).array.argmax(axis=1)
        """
        function = self._targets['main'] if self.eval_func is None else self.eval_func
        return function(*args, **kwargs)

    def aggregate(self, results: list[Any]) -> Any:
        """Combine the results of all ranks. Called on the root only.

        By default, this returns the results unchanged.

        Args:
            results: The results of the first batches of all ranks, ordered by rank, followed by the
                results of their second batches, and so on.

        Returns:
            The result of the extension on the root. To log it, call ``chainer.report`` here.

        Example:
            >>> class Examples(chainermn.extensions.GenericMultiNodeEvaluator):
            ...     def calc_local(self, xs, ts):
            ...         return len(xs)
            ...     def aggregate(self, results):
            ...         return sum(results)
            >>> iterator = chainer.iterators.SerialIterator(train, 2, repeat=False, shuffle=False)
            >>> Examples(comm, iterator, model)()
            8
        """
        return results

    def __call__(self, trainer: chainer.training.Trainer | None = None) -> Any:
        """Evaluate. Collective: every rank calls it.

        Args:
            trainer: Ignored.

        Returns:
            On the root, the result of :meth:`aggregate`. On the other ranks, ``None``.

        Raises:
            Exception: On every rank, if ``calc_local`` or ``aggregate`` raises an error on a rank.
        """
        operation = type(self).__name__
        with raise_together(self.comm, operation), \
                chainer.using_config('train', False), chainer.no_backprop_mode():
            results = list(self._local_results())
            digests = self._replica_check.digests(self._targets)
        with self.comm.called_by('GenericMultiNodeEvaluator'):
            gathered = self.comm.gather_obj((results, digests), self.root)
        if gathered is not None:
            self._replica_check.compare([each for _, each in gathered])
        result = None
        with raise_together(self.comm, operation):
            if gathered is not None:
                rows = zip_longest(*(each for each, _ in gathered), fillvalue=_NOTHING)
                result = self.aggregate([result for row in rows for result in row
                                         if result is not _NOTHING])
        with self.comm.called_by('GenericMultiNodeEvaluator'):
            self.comm.barrier()  # raises an error of the root on the other ranks
        return result

    def _local_results(self) -> Iterator[Any]:
        iterator = self.iterator
        if hasattr(iterator, 'reset'):
            iterator.reset()
        else:
            iterator = copy.copy(iterator)
        if is_empty(iterator):
            return  # Chainer's iterators would divide by zero
        for batch in iterator:
            converted = self.converter(batch, self.device)
            if isinstance(converted, tuple):
                result = self.calc_local(*converted)
            elif isinstance(converted, dict):
                result = self.calc_local(**converted)
            else:
                result = self.calc_local(converted)
            if result is None:
                raise ValueError(f'{type(self).__name__}.calc_local returned None; return a result '
                                 'for every batch')
            yield result
            if self._progress_hook is not None and self.comm.rank == self.root:
                self._progress_hook(batch)
