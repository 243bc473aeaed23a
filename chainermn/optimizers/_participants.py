"""The ranks that take part in updates: all ranks, or in a join, the active ranks."""
from __future__ import annotations

from typing import Literal

from chainermn._types import Model

#: The collective operation of an update.
Operation = Literal['broadcast', 'average']


class AllRanks:
    """All ranks, each with its own batches. Base class of :class:`~._join.Join`.

    Attributes:
        are_in_lockstep: Whether all ranks are at the same update, so that they can compare counts.
    """

    are_in_lockstep = True

    def announce(self, operation: Operation) -> None:
        """Start an operation of this rank. Collective: every rank calls it."""

    def scale(self, model: Model) -> None:
        """Convert means over all ranks to means over the ranks that have gradients."""
