"""An evaluator whose result is not a mean: each rank computes, one rank combines."""
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import chainer

_NOTHING = object()


class GenericMultiNodeEvaluator(chainer.training.Extension):
    """An evaluator for measures such as BLEU or F1, which have to see all results at once.

    Every rank calls :meth:`calc_local` on each of its batches.  The root gets all results and
    calls :meth:`aggregate`.  Collective: every rank runs the extension; the numbers of batches may
    differ.  The results are exchanged once, so an error of one rank is raised on each of the others
    when that is done with its own batches.

    As it is, it calls the target, and returns all results on the root.  Derive from it to compute
    something else.

    Args:
        comm: ChainerMN communicator.
        iterator: This rank's iterator, without repeat.
        target: What ``calc_local`` calls, such as a model; at ``self._targets['main']``.
        device: Where the converter puts the batches.
        converter: Turns a batch into the arguments of ``calc_local``.
        root: The rank that aggregates; the same on all ranks.
        progress_hook: Function that the root calls with each batch once it is done.
    """

    trigger = 1, 'epoch'
    default_name = 'validation'
    priority = chainer.training.extension.PRIORITY_WRITER
    name: str | None = None

    #: Function that :meth:`calc_local` calls instead of the target.
    eval_func: Callable[..., Any] | None = None

    def __init__(self, comm: Any, iterator: Any, target: Any, device: Any = None,
                 converter: Any = chainer.dataset.concat_examples, root: int = 0, **kwargs: Any
                 ) -> None:
        self._progress_hook: Callable[[Any], Any] | None = kwargs.pop('progress_hook', None)
        if kwargs:
            raise TypeError(f'{type(self).__name__} got unexpected keyword arguments '
                            f'{sorted(kwargs)}')
        self.comm = comm
        self.iterator = iterator
        self._targets = {'main': target}
        self.converter = converter
        self.device = device
        self.root = root

    def calc_local(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates one batch: calls the target, or ``eval_func``.

        Args:
            args: What the converter made of the batch; by name if it made a dict.

        Returns:
            Any picklable object but ``None``.
        """
        function = self._targets['main'] if self.eval_func is None else self.eval_func
        return function(*args, **kwargs)

    def aggregate(self, results: list[Any]) -> Any:
        """Combines the results: returns them as they are.  Called on the root only.

        Args:
            results: The results of all batches of all ranks: of the first batches by rank, of the
                second batches by rank, and so on.

        Returns:
            What the extension returns on the root.  To log it, call ``chainer.report`` here.
        """
        return results

    def __call__(self, trainer: Any = None) -> Any:
        """Evaluates.  Returns the result on the root, ``None`` elsewhere."""
        verb = f'{type(self).__name__}'
        with chainer.using_config('train', False), chainer.no_backprop_mode():
            try:
                results = list(self._local_results())
            except Exception as error:
                self.comm.refuse(verb, error)
        gathered = self.comm.gather_obj(results, self.root)
        result = None
        try:
            if gathered is not None:
                rows = zip_longest(*gathered, fillvalue=_NOTHING)
                result = self.aggregate([result for row in rows for result in row
                                         if result is not _NOTHING])
        except Exception as error:
            self.comm.refuse(verb, error)
        self.comm.barrier()  # where the others learn of the error
        return result

    def _local_results(self) -> Iterator[Any]:
        iterator = self.iterator
        if hasattr(iterator, 'reset'):
            iterator.reset()
        else:
            iterator = copy.copy(iterator)
        if not len(getattr(iterator, 'dataset', [()])):
            return  # Chainer's iterators divide by zero
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
