"""In debug mode, the models of all ranks are compared after every k-th update."""
from __future__ import annotations

import chainer

from chainermn._process import environment
from chainermn._types import Model
from chainermn.communicators.communicator_base import CommunicatorBase

_INTERVAL = 100  # updates


class ReplicaCheck:
    """The check of one model.

    Args:
        communicator: The ranks.
    """

    def __init__(self, communicator: CommunicatorBase) -> None:
        self._communicator = communicator
        self._has_debug_variable = environment.flag(environment.DEBUG)
        self._n_updates = 0

    def after_update(self, model: Model) -> None:
        """Compare the models, if it is time.  Collective: every rank calls it."""
        if self._has_debug_variable or chainer.is_debug():
            self._n_updates += 1
            if self._n_updates % _interval() == 0:
                self._communicator.check_replicas(model)


def _interval() -> int:
    text = environment.text(environment.DEBUG_EVERY) or str(_INTERVAL)
    if not text.isdecimal() or not int(text):
        raise ValueError(f'{environment.DEBUG_EVERY} must be a number of updates, 1 or more, '
                         f'not {text!r}')
    return int(text)
