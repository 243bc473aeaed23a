"""LinearScaling: learning rates for large batches, with warm-up."""
from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import chainer

from chainermn._operations.on_all_ranks import on_all_ranks, raise_together
from chainermn._types import Optimizer
from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions._epoch_length import samples_per_epoch


class LinearScaling(chainer.training.Extension):
    """Scales the learning rate with the total batch size of all ranks, after a warm-up.

    This is the linear scaling rule with gradual warm-up of Goyal et al. (2017),
    https://arxiv.org/abs/1706.02677. The learning rate of the optimizer is meant for
    ``base_batch_size`` examples per update. If all ranks together use k times as many examples, the
    learning rate grows linearly from this value to k times this value in the first
    ``warmup_epochs`` epochs.

    The total batch size is the sum of the ranks' batch sizes, times ``n_accumulations`` of the
    multi-node optimizer.

    Add the extension on all ranks. Do not combine it with other extensions that set the same
    attribute; pass ``decay`` instead. The learning rate only depends on the iteration, so it is
    correct after resuming.

    Collective at the beginning of training.

    Args:
        comm: ChainerMN communicator.
        base_batch_size: Number of examples per update for which the learning rate of the optimizer
            is meant. By default, the batch size of rank 0, so that k is ``comm.size`` if all ranks
            have the same batch size.
        warmup_epochs: Length of the warm-up in epochs; 0 for no warm-up.
        decay: Function that returns a factor for the learning rate in an epoch, such as
            ``lambda epoch: 0.1 ** (epoch // 30)``. The epoch is a float.
        attr: Name of the hyperparameter to set, such as ``'alpha'`` for Adam.
        optimizer: The optimizer; by default, the main optimizer of the trainer's updater.

    Example:
        >>> trainer.extend(chainermn.extensions.LinearScaling(
        ...     comm, base_batch_size=2, warmup_epochs=1))
        >>> trainer.run()
        >>> optimizer.lr  # 0.1 for 2 examples, so 0.2 for the 4 of both ranks
        0.2
    """

    trigger = 1, 'iteration'

    def __init__(self, comm: CommunicatorBase, base_batch_size: float | None = None,
                 warmup_epochs: float = 5, decay: Callable[[float], float] | None = None,
                 attr: str = 'lr', optimizer: Optimizer | None = None) -> None:
        self.comm = as_communicator(comm, 'LinearScaling(comm)')
        self.base_batch_size = base_batch_size
        self.warmup_epochs = warmup_epochs
        self.decay = decay
        self.attr = attr
        self._optimizer = optimizer
        self._schedule: _Schedule | None = None

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Set the learning rate of the next update. Collective: every rank calls it.

        Raises:
            ValueError: On every rank, if the optimizer of a rank has no such hyperparameter, or if
                the learning rates or arguments of the ranks differ.
            AttributeError: On every rank, if an iterator has no batch size or dataset.
        """
        if self._schedule is None:
            with raise_together(self.comm, 'LinearScaling'):
                mine = self._inspect(trainer)
            with self.comm.called_by('LinearScaling'):
                ranks = self.comm.allgather_obj(mine)
            self._schedule = _schedule(self.comm, ranks)
        self(trainer)

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Set the learning rate of the next update."""
        assert self._schedule is not None
        iteration = trainer.updater.iteration
        rate = self._schedule.rate(iteration)
        if self.decay is not None:
            rate *= self.decay(iteration / self._schedule.iterations_per_epoch)
        setattr(self._optimizer_of(trainer), self.attr, rate)

    def _optimizer_of(self, trainer: chainer.training.Trainer) -> Optimizer:
        return self._optimizer or trainer.updater.get_optimizer('main')

    def _inspect(self, trainer: chainer.training.Trainer) -> _RankSettings:
        optimizer = self._optimizer_of(trainer)
        known = optimizer.hyperparam.get_dict()
        if self.attr not in known:
            raise ValueError(f'the optimizer has no hyperparameter {self.attr!r}; set attr to one '
                             f'of {", ".join(map(repr, sorted(known)))}')
        iterator = trainer.updater.get_iterator('main')
        accumulation = getattr(optimizer, '_accumulation', None)
        return _RankSettings(iterator.batch_size, samples_per_epoch(iterator),
                             1 if accumulation is None else accumulation.n,
                             (known[self.attr], self.base_batch_size, self.warmup_epochs))


class _RankSettings(NamedTuple):
    """The settings of a rank."""

    batch_size: int
    examples: int
    accumulations: int
    #: Learning rate, base batch size and warm-up epochs, which must be the same on all ranks.
    arguments: tuple[float, float | None, float]


class _Schedule(NamedTuple):
    """The learning rate without decay, the same on all ranks."""

    base: float
    factor: float
    warmup: float  # iterations
    iterations_per_epoch: float

    def rate(self, iteration: int) -> float:
        """Return the learning rate for the update after this iteration."""
        done = iteration / self.warmup if iteration < self.warmup else 1.
        return self.base * (1 + (self.factor - 1) * done)


def _schedule(comm: CommunicatorBase, ranks: list[_RankSettings]) -> _Schedule:
    if len({rank.arguments for rank in ranks}) > 1:
        raise on_all_ranks(comm, ValueError(
            'LinearScaling: the ranks have different learning rates or arguments\n' + ''.join(
                '  rank {}: learning rate {}, base_batch_size={}, warmup_epochs={}\n'.format(
                    i, *rank.arguments) for i, rank in enumerate(ranks))
            + 'Pass the same values on all ranks.'))
    base, base_batch_size, epochs = ranks[0].arguments
    batch_size = sum(rank.batch_size for rank in ranks)
    factor = batch_size * ranks[0].accumulations / (base_batch_size or ranks[0].batch_size)
    iterations_per_epoch = sum(rank.examples for rank in ranks) / batch_size
    schedule = _Schedule(base, factor, epochs * iterations_per_epoch, iterations_per_epoch)
    if comm.rank == 0:
        logging.getLogger('chainermn').info(
            'LinearScaling: the learning rate grows from %g to %g in %d iterations',
            base, base * factor, round(schedule.warmup))
    return schedule
