"""Warns if the script calls ``update`` of the actual optimizer, so that the ranks drift apart."""
from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

from chainer.optimizer import GradientMethod

from chainermn._process.program_place import program_place
from chainermn._types import Object, Optimizer
from chainermn.communicators.communicator_base import CommunicatorBase

_ATTRIBUTE = '_chainermn_watch'  # attribute of the actual optimizer
_STEPS = 3  # number of steps after which to warn

_update = GradientMethod.update


@functools.wraps(_update)
def _watched_update(self: Optimizer, lossfun: Object = None, *args: Object, **kwds: Object) -> None:
    _update(self, lossfun, *args, **kwds)
    watch = getattr(self, _ATTRIBUTE, None)
    if watch is not None and not watch.is_averaged:
        watch.note_step(self)


class UpdateWatch:
    """Counts the steps of an optimizer with gradients that were not averaged.

    If the script itself has called an operation of any communicator since the last step, it may
    have averaged the gradients, so the step is not counted. Operations called by extensions and
    links of this package are ignored.

    Args:
        optimizer: The optimizer.
        n_calls: Function that returns how many operations the script has called.

    Attributes:
        is_averaged: Whether a multi-node optimizer takes the current step.
    """

    def __init__(self, optimizer: Optimizer, n_calls: Callable[[], int]) -> None:
        self.is_averaged = False
        self._id = id(optimizer)
        self._n_alone = 0
        self._n_calls = n_calls
        self._n_seen = n_calls()
        self._place = program_place()  # the line that creates the optimizer

    def note_step(self, optimizer: Optimizer) -> None:
        """Count a step that the script takes with the optimizer or a copy of it.

        Warns:
            RuntimeWarning: At the third step of the optimizer with gradients that were not
                averaged.
        """
        before, self._n_seen = self._n_seen, self._n_calls()
        if before != self._n_seen or id(optimizer) != self._id:
            return
        self._n_alone += 1
        if self._n_alone == _STEPS:
            name = type(optimizer).__name__
            warnings.warn_explicit(
                f'the ranks do not average gradients: the script called {name}.update '
                f'({_STEPS} steps) instead of update of the multi-node optimizer created '
                'here, so each rank trains a different model. Pass the multi-node optimizer to the '
                'updater, or call its update method.', RuntimeWarning, *self._place)


def watch(actual_optimizer: Optimizer, communicator: CommunicatorBase) -> UpdateWatch:
    """Return the watch of an optimizer. It is active only on rank 0 of several ranks."""
    found = getattr(actual_optimizer, _ATTRIBUTE, None)
    if found is not None:
        return found
    n_calls = getattr(communicator, '_n_calls_of_program', None)  # third-party ones do not have it
    created = UpdateWatch(actual_optimizer, n_calls or int)
    if n_calls and communicator.rank == 0 and communicator.size > 1 and (
            isinstance(actual_optimizer, GradientMethod)):
        setattr(actual_optimizer, _ATTRIBUTE, created)
        if GradientMethod.update is _update:
            GradientMethod.update = _watched_update
    return created
