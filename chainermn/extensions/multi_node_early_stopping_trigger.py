"""MultiNodeEarlyStoppingTrigger stops all ranks in the same iteration, based on a common mean."""
from __future__ import annotations

import warnings

import chainer

from chainermn._process.program_place import program_place
from chainermn._types import Serializer
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions.observation_aggregator import ObservationAggregator, Trigger


class MultiNodeEarlyStoppingTrigger:
    """Applies Chainer's ``EarlyStoppingTrigger`` to the mean of a value over all ranks.

    Pass this trigger to a trainer as the stop trigger. Collective whenever ``check_trigger`` fires.

    Args:
        comm: ChainerMN communicator.
        check_trigger: Trigger that determines when the value is checked.
        monitor: Key of the value in ``trainer.observation``.
        patience: Number of checks without improvement after which training stops; 3 by default.
            ``patients`` is the old name.
        mode: ``'min'``, ``'max'`` or ``'auto'`` (from the name of the key).
        verbose: Whether to print a message when training stops early.
        max_trigger: End of training if it does not stop early.
        suffix: Suffix of the mean's key in ``trainer.observation``, which is ``monitor + suffix``.

    Raises:
        TypeError: If ``monitor`` is not a str.

    Example:
        >>> stop = chainermn.extensions.MultiNodeEarlyStoppingTrigger(
        ...     comm, monitor='main/loss', patience=3, max_trigger=(2, 'epoch'))
        >>> trainer = chainer.training.Trainer(trainer.updater, stop)
        >>> trainer.run()
    """

    def __init__(self, comm: CommunicatorBase, *, check_trigger: Trigger = (1, 'epoch'),
                 monitor: str = 'main/loss', patience: int | None = None, mode: str = 'auto',
                 verbose: bool = False, max_trigger: tuple[float, str] = (100, 'epoch'),
                 suffix: str = '_aggregated', **kwargs: int) -> None:
        if not isinstance(monitor, str):
            raise TypeError('MultiNodeEarlyStoppingTrigger: monitor must be the key of a value, '
                            f"such as 'validation/main/loss', not {monitor!r}")
        if unknown := sorted(kwargs.keys() - {'patients'}):
            raise TypeError(
                f'MultiNodeEarlyStoppingTrigger got unexpected keyword arguments {unknown}')
        self._check = _SharedTrigger(check_trigger)
        self.actual_trigger = chainer.training.triggers.EarlyStoppingTrigger(
            check_trigger=self._check, monitor=monitor + suffix, patience=patience, mode=mode,
            verbose=verbose, max_trigger=max_trigger, **kwargs)
        self.aggregator: ObservationAggregator = ObservationAggregator(
            comm, monitor, monitor + suffix, comm_trigger=self._check)
        self._has_warned = False
        self._place = program_place()

    def __call__(self, trainer: chainer.training.Trainer) -> bool:
        """Return whether to stop, the same on all ranks.

        Warns:
            UserWarning: Once, on rank 0, if no rank observed the value before a check.
        """
        self._check.ask(trainer)
        with self.aggregator.comm.called_by('MultiNodeEarlyStoppingTrigger'):
            self.aggregator(trainer)
        if self.actual_trigger.monitor in trainer.observation:
            return self.actual_trigger(trainer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            stops = self.actual_trigger(trainer)
        for each in caught:
            if 'is not in observation' not in str(each.message):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
            elif self.aggregator.comm.rank == 0 and not self._has_warned:
                self._has_warned = True
                known = ', '.join(map(repr, sorted(trainer.observation))) or 'nothing'
                warnings.warn_explicit(
                    f'MultiNodeEarlyStoppingTrigger: no rank reported '
                    f'{self.aggregator.original_key!r}; rank 0 reported {known}. Correct monitor, '
                    'or pass a check_trigger that fires when the value is reported.', UserWarning,
                    *self._place)
        return stops

    def get_training_length(self) -> tuple[float, str]:
        """Return the maximum length of training, such as ``(100, 'epoch')``.

        Example:
            >>> stop = chainermn.extensions.MultiNodeEarlyStoppingTrigger(
            ...     comm, max_trigger=(30, 'epoch'))
            >>> stop.get_training_length()
            (30, 'epoch')
        """
        return self.actual_trigger.get_training_length()

    def serialize(self, serializer: Serializer) -> None:
        """Save or load the best value, the number of checks since then, and values to average.

        Args:
            serializer: A Chainer serializer or deserializer.
        """
        self.aggregator.serialize(serializer['aggregator'])
        self.actual_trigger.serialize(serializer['actual_trigger'])


class _SharedTrigger:
    """Calls a trigger once per iteration and shares the result.

    An ``IntervalTrigger`` that is called twice in one iteration fires the first time only.
    """

    def __init__(self, trigger: Trigger) -> None:
        self._trigger = chainer.training.get_trigger(trigger)
        self._fires = False

    def ask(self, trainer: chainer.training.Trainer) -> None:
        """Call the trigger and keep the result."""
        self._fires = bool(self._trigger(trainer))

    def __call__(self, trainer: chainer.training.Trainer) -> bool:
        """Return the result."""
        return self._fires

    def serialize(self, serializer: Serializer) -> None:
        """Save or load the state of the trigger, if it has one."""
        if hasattr(self._trigger, 'serialize'):
            self._trigger.serialize(serializer)
