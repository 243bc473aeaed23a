"""In debug mode the replicas of a model are compared at times, to name what drifts apart."""
from __future__ import annotations

import os
from typing import Any

import chainer

_EVERY = 'CHAINERMN_DEBUG_EVERY'
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
        if not chainer.is_debug() and os.environ.get('CHAINERMN_DEBUG', '0') in ('', '0'):
            return
        self._count += 1
        if self._count % _every() == 0:
            communicator.check_replicas(model)


def _every() -> int:
    text = os.environ.get(_EVERY) or str(_USUALLY)
    if not text.isdecimal() or not int(text):
        raise ValueError(f'{_EVERY} has to be a number of updates, 1 or more, not {text!r}')
    return int(text)
