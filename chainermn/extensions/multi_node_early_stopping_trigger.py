"""Stops training on all ranks at once, by a value aggregated over them."""
from __future__ import annotations

from typing import Any

import chainer

from chainermn.extensions.observation_aggregator import ObservationAggregator


class MultiNodeEarlyStoppingTrigger:
    """Chainer's ``EarlyStoppingTrigger`` on the mean of a value over all ranks.

    To be a trainer's stop trigger.  Collective whenever ``check_trigger`` fires.

    Args:
        comm: ChainerMN communicator.
        check_trigger: When to look at the value.
        monitor: The key of the value in ``trainer.observation``.
        patience: How many times the value may fail to improve; 3 by default.  ``patients`` is its
            older name.
        mode: ``'min'``, ``'max'`` or ``'auto'`` (by the name of the key).
        verbose: Whether to print when training stops early.
        max_trigger: When training stops at the latest.
        suffix: The mean is written to ``trainer.observation[monitor + suffix]``.
    """

    def __init__(self, comm: Any, *, check_trigger: Any = (1, 'epoch'), monitor: str = 'main/loss',
                 patience: int | None = None, mode: str = 'auto', verbose: bool = False,
                 max_trigger: Any = (100, 'epoch'), suffix: str = '_aggregated', **kwargs: Any
                 ) -> None:
        self.actual_trigger = chainer.training.triggers.EarlyStoppingTrigger(
            check_trigger=check_trigger, monitor=monitor + suffix, patience=patience, mode=mode,
            verbose=verbose, max_trigger=max_trigger, **kwargs)
        self.aggregator = ObservationAggregator(
            comm, monitor, monitor + suffix, comm_trigger=check_trigger)

    def __call__(self, trainer: Any) -> bool:
        """Whether to stop; the same on all ranks."""
        self.aggregator(trainer)
        return self.actual_trigger(trainer)

    def get_training_length(self) -> Any:
        """The longest that training can take, such as ``(100, 'epoch')``."""
        return self.actual_trigger.get_training_length()
