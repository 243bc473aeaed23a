"""In debug mode the replicas of a model are compared at times, to name what drifts apart."""
from __future__ import annotations

from typing import Any

import chainer

from chainermn import _environment

_USUALLY = 100


class ReplicaCheck:
    """Counts the updates of an optimizer, and compares the replicas after every k-th.

    k is ``CHAINERMN_DEBUG_EVERY`` in the environment, or else 100.  Nothing is done unless
    Chainer's debug mode or ``CHAINERMN_DEBUG=1`` is on.
    """

    def __init__(self) -> None:
        self._count = 0

    def after_update(self, communicator: Any, model: Any) -> None:
        """Collective if it is on: every rank calls it after the same updates."""
        if not chainer.is_debug() and not _environment.flag(_environment.DEBUG):
            return
        self._count += 1
        if self._count % _every() == 0:
            communicator.check_replicas(model)


def _every() -> int:
    text = _environment.text(_environment.DEBUG_EVERY) or str(_USUALLY)
    if not text.isdecimal() or not int(text):
        raise ValueError(f'{_environment.DEBUG_EVERY} has to be a number of updates, 1 or more, '
                         f'not {text!r}')
    return int(text)
