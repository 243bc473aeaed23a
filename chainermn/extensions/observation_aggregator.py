"""ObservationAggregator: reports a value aggregated over ranks and iterations."""
from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeAlias, cast

import chainer
import numpy as np

from chainermn._operations.on_all_ranks import raise_together
from chainermn._types import Serializer
from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions._calls import called_by
from chainermn.extensions._observation import Value, to_host

#: A trigger of Chainer: an interval such as ``(1, 'epoch')``, or a function of the trainer.
Trigger: TypeAlias = tuple[float, str] | Callable[[chainer.training.Trainer], bool]


class ObservationAggregator(chainer.training.Extension):
    """Aggregates the values of one key over all ranks and adds the result to their observations.

    Collective whenever ``comm_trigger`` fires, which must happen in the same iterations on all
    ranks. Each time, it needs one collective operation, or two with an ``aggregator``.

    Args:
        comm: ChainerMN communicator.
        original_key: Key of the value in ``trainer.observation``, such as ``'main/loss'``. It may
            be missing in any iteration, on any rank.
        aggregated_key: Key of the result; ``original_key`` by default.
        comm_trigger: Trigger that determines when values are aggregated. Each time, all values
            since the last time are aggregated.
        aggregator: Function that gets one list of values per rank, ordered by rank, and returns the
            result. It is called on rank 0; pass it on all ranks or on none. By default, the result
            is the mean of all values.

    Raises:
        TypeError: If ``aggregator`` is not a function.

    Example:
        >>> trainer.extend(chainermn.extensions.ObservationAggregator(comm, 'main/loss'))
        >>> trainer.run()
        >>> 'main/loss' in trainer.observation
        True
    """

    trigger: Trigger = (1, 'iteration')
    priority: int = chainer.training.extension.PRIORITY_EDITOR

    def __init__(self, comm: CommunicatorBase, original_key: str,
                 aggregated_key: str | None = None, *, comm_trigger: Trigger = (1, 'iteration'),
                 aggregator: Callable[[list[list[Value]]], Value] | None = None) -> None:
        self.comm = as_communicator(comm, 'ObservationAggregator(comm, original_key)')
        if aggregator is not None and not callable(aggregator):
            raise TypeError('ObservationAggregator: aggregator must be a function of the values of '
                            f'all ranks, or None, not {aggregator!r}')
        self.original_key = original_key
        self.aggregated_key: str = original_key if aggregated_key is None else aggregated_key
        self.comm_trigger = chainer.training.get_trigger(comm_trigger)
        self.aggregator = _mean if aggregator is None else aggregator
        self.observation_history: list[Value] = []  # values that have not been aggregated yet

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Store the value of this iteration; aggregate when ``comm_trigger`` fires."""
        value = trainer.observation.get(self.original_key)
        if value is not None:
            self.observation_history.append(to_host(value))
        if self.comm_trigger(trainer):
            result = self.compute_summary(trainer)
            if result is not None:
                trainer.observation[self.aggregated_key] = result

    @called_by('ObservationAggregator')
    def compute_summary(self, trainer: chainer.training.Trainer | None = None) -> Value | None:
        """Aggregate the stored values and discard them. Collective: every rank calls it.

        Args:
            trainer: Ignored.

        Returns:
            The result, on every rank; ``None`` if no rank observed a value.

        Raises:
            Exception: On every rank, if the aggregator raises an error.

        Example:
            >>> aggregator = chainermn.extensions.ObservationAggregator(
            ...     comm, 'main/loss', comm_trigger=(1, 'epoch'))
            >>> aggregator.observation_history.append(float(comm.rank))
            >>> print(aggregator.compute_summary())
            0.5
        """
        values, self.observation_history = self.observation_history, []
        if self.aggregator is _mean:
            return _mean(self.comm.allgather_obj(values))
        gathered = self.comm.gather_obj(values)
        result = None
        with raise_together(self.comm, 'the aggregator of ObservationAggregator'):
            if gathered is not None and any(gathered):
                result = self.aggregator(gathered)
        return cast('Value | None', self.comm.bcast_obj(result))

    def serialize(self, serializer: Serializer) -> None:
        """Save or load the trigger, and the values that have not been aggregated yet.

        Args:
            serializer: A Chainer serializer or deserializer.

        Warns:
            RuntimeWarning: When saving, if values are neither numbers nor arrays of numbers, so
                they are not saved. When loading, if the values are missing from the file.
        """
        if hasattr(self.comm_trigger, 'serialize'):
            self.comm_trigger.serialize(serializer['comm_trigger'])
        if isinstance(serializer, chainer.Deserializer):
            try:
                self.observation_history = _load_values(serializer['history'])
            except KeyError:
                warnings.warn('The snapshot has no pending values of ObservationAggregator, so its '
                              'next result covers only the iterations after the resume.',
                              RuntimeWarning, stacklevel=2)
        elif all(np.asarray(value).dtype.kind in 'biufc' for value in self.observation_history):
            _save_values(serializer['history'], self.observation_history)
        else:
            warnings.warn(f'ObservationAggregator cannot save the values of {self.original_key!r}, '
                          'which are not numbers. After a resume, its next result covers only the '
                          'iterations after the resume.', RuntimeWarning, stacklevel=2)


def _mean(gathered: list[list[Value]]) -> Value | None:
    values = [_wide(value) for values in gathered for value in values]
    return sum(values[1:], values[0]) / len(values) if values else None


def _wide(value: Value) -> Value:
    """Convert a value to float64, so that its sum loses no small values and does not overflow."""
    dtype = getattr(value, 'dtype', None)
    is_narrow = dtype is not None and dtype.kind in 'biuf' and dtype.itemsize <= 8
    return np.asarray(value, np.float64)[()] if is_narrow else value


def _save_values(serializer: Serializer, values: list[Value]) -> None:
    arrays = [np.asarray(value) for value in values]
    is_uniform = len({(array.dtype, array.shape) for array in arrays}) == 1
    serializer('n', len(arrays))
    serializer('is_uniform', is_uniform)
    if is_uniform:  # save one array, because there may be a value for each iteration
        arrays = [np.stack(arrays)]
    for i, array in enumerate(arrays):
        serializer(str(i), array)


def _load_values(serializer: Serializer) -> list[Value]:
    n = int(serializer('n', 0))
    if serializer('is_uniform', False):
        return list(serializer('0', None))
    return [serializer(str(i), None)[()] for i in range(n)]
