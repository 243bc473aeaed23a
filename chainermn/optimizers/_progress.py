"""How far an optimizer is on this rank, so that ranks that are at different updates are noticed."""
from __future__ import annotations


class Progress:
    """Counts the updates that began since gradients were last exchanged for a step.

    The ranks compare the count when they exchange gradients.  An update that raised an error on one
    rank counts there, so the next one finds that rank ahead of the others.  It does not count if
    the rank then takes part in the exchange with an update without a loss function.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Starts again, as all ranks do."""
        self.count = 0
        self._is_open = False

    def begin(self, has_loss: bool) -> None:
        """Begins an update."""
        if has_loss or not self._is_open:
            self.count += 1
        self._is_open = True

    def close(self) -> None:
        """Notes that the other ranks wait for nothing more of this one in the update."""
        self._is_open = False
