"""Reports a value that is aggregated over ranks and iterations."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer


class ObservationAggregator(chainer.training.Extension):
    """Aggregates what all ranks observed of one key, and puts the result in their observations.

    Collective whenever ``comm_trigger`` fires, on all ranks in the same iteration.  That is one
    exchange, or two with an ``aggregator``.

    Args:
        comm: ChainerMN communicator.
        original_key: The key to read from ``trainer.observation``, such as ``'main/loss'``.  It
            need not be there in every iteration, nor on every rank.
        aggregated_key: The key to write the result to; ``original_key`` by default.
        comm_trigger: When to aggregate what was observed since the last time.
        aggregator: Function of a list, with a list of values for each rank, by rank, that returns
            the result.  It runs on rank 0; all ranks pass one or none does.  The mean of all values
            by default.
    """

    trigger = 1, 'iteration'
    priority = chainer.training.extension.PRIORITY_EDITOR

    def __init__(self, comm: Any, original_key: str, aggregated_key: str | None = None, *,
                 comm_trigger: Any = (1, 'iteration'),
                 aggregator: Callable[[list[list[Any]]], Any] | None = None) -> None:
        self.comm = comm
        self.original_key = original_key
        self.aggregated_key = original_key if aggregated_key is None else aggregated_key
        self.comm_trigger = chainer.training.get_trigger(comm_trigger)
        self.aggregator = _mean if aggregator is None else aggregator
        self.observation_history: list[Any] = []  # since the last time

    def __call__(self, trainer: Any) -> None:
        """Keeps this iteration's value; aggregates if the time has come."""
        value = trainer.observation.get(self.original_key)
        if value is not None:
            self.observation_history.append(_to_host(value))
        if self.comm_trigger(trainer):
            result = self.compute_summary(trainer)
            if result is not None:
                trainer.observation[self.aggregated_key] = result

    def compute_summary(self, trainer: Any = None) -> Any:
        """Aggregates what was kept, and forgets it.  Collective: every rank calls it.

        Returns:
            On every rank the result; ``None`` if no rank observed a value.
        """
        values, self.observation_history = self.observation_history, []
        if self.aggregator is _mean:
            return _mean(self.comm.allgather_obj(values))
        gathered = self.comm.gather_obj(values)
        result = None
        try:
            if gathered is not None and any(gathered):
                result = self.aggregator(gathered)
        except Exception as error:
            self.comm.refuse('the aggregator of ObservationAggregator', error)
        return self.comm.bcast_obj(result)


def _mean(gathered: list[list[Any]]) -> Any:
    values = [value for values in gathered for value in values]
    return sum(values[1:], values[0]) / len(values) if values else None


def _to_host(value: Any) -> Any:
    if isinstance(value, chainer.Variable):
        value = value.array
    if isinstance(value, chainer.get_array_types()):
        value = chainer.get_device('@numpy').send(value)
        return value[()]  # a scalar rather than an array without dimensions
    return value
