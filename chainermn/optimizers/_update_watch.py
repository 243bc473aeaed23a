"""Warns if the program only updates the actual optimizer, so that the ranks drift apart."""
from __future__ import annotations

import atexit
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable

from chainer.optimizer import GradientMethod

from chainermn._process import runtime
from chainermn._types import Object, Optimizer
from chainermn.communicators.communicator_base import CommunicatorBase

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


_SEVERAL = 3  # steps
_update = GradientMethod.update


def _watched_update(self: Optimizer, lossfun: Object = None, *args: Object, **kwds: Object) -> None:
    """Update as Chainer's method, which it replaces while there are watches."""
    _update(self, lossfun, *args, **kwds)
    for each in list(runtime.get(_UpdateWatches).watches):
        each.note_step(self)


class _UpdateWatches(runtime.Part):
    """The watches of this process."""

    def __init__(self) -> None:
        self.watches: weakref.WeakSet[UpdateWatch] = weakref.WeakSet()
        atexit.register(self.check)

    def add(self, watch: UpdateWatch) -> None:
        self.watches.add(watch)
        if GradientMethod.update is _update:
            GradientMethod.update = _watched_update

    def remove(self, watch: UpdateWatch) -> None:
        self.watches.discard(watch)
        if not self.watches and GradientMethod.update is _watched_update:
            GradientMethod.update = _update

    def check(self) -> None:
        for each in list(self.watches):
            each.check()
            self.remove(each)


class UpdateWatch:
    """Whether the ranks average before the actual optimizer steps.

    Checked at its third step, when the multi-node optimizer is deleted, and at the end of the
    program.  A program that calls at least as many operations as the optimizer steps may average by
    itself.

    Args:
        actual_optimizer: The optimizer of this rank.
        communicator: The communicator of the multi-node optimizer.
    """

    def __init__(self, actual_optimizer: Optimizer, communicator: CommunicatorBase) -> None:
        self.is_over = communicator.rank > 0 or communicator.size == 1
        self._actual_optimizer = actual_optimizer
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back
        self._place = frame.f_code.co_filename, frame.f_lineno  # that creates the optimizer
        records: Callable[[], Iterable[Object]] = getattr(communicator, '_flight_records', tuple)
        self._records = list(records())  # not the communicator, which may be finalized
        self.restart()
        if not self.is_over:
            runtime.get(_UpdateWatches).add(self)

    def end(self) -> None:
        """Stop: the program uses a multi-node optimizer for the actual one."""
        watches = runtime.get(_UpdateWatches)
        for each in [*watches.watches]:
            if each._actual_optimizer is self._actual_optimizer:
                each.is_over = True
                watches.remove(each)
        self.is_over = True

    def note_step(self, optimizer: Optimizer) -> None:
        """Check at the third step of the actual optimizer, or later ones."""
        if optimizer is self._actual_optimizer:
            self._n_steps += 1
            if self._n_steps >= _SEVERAL:
                self.check()

    def restart(self) -> None:
        """Ignore the steps so far."""
        self._n_steps = 0
        self._n_operations = self._count()

    def check(self) -> None:
        """Warn if the actual optimizer stepped alone.

        Warns:
            RuntimeWarning: Once, on rank 0.
        """
        if self.is_over or self not in runtime.get(_UpdateWatches).watches:
            return
        if self._n_steps > self._count() - self._n_operations:
            self.end()
            name = type(self._actual_optimizer).__name__
            warnings.warn_explicit(
                f'the ranks do not average gradients: the program called {name}.update '
                f'({self._n_steps} steps) instead of update of the multi-node optimizer created '
                'here, so each rank trains a different model. Pass the multi-node optimizer to the '
                'updater, or call its update method.', RuntimeWarning, *self._place)

    def _count(self) -> int:
        return sum(record.count for record in self._records)

    def __del__(self) -> None:
        if hasattr(self, '_n_operations') and not self.is_over:  # not in a failed copy
            self.check()
            self.end()
