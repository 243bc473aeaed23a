"""RankFilter: log messages of one rank instead of all."""
from __future__ import annotations

import logging
from collections.abc import Collection

from chainermn.communicators.communicator_base import CommunicatorBase


class RankFilter(logging.Filter):
    """Shows all log messages of rank 0, but only warnings and errors of the other ranks.

    The filter also adds the attribute ``rank`` to each message, for use in the format. Add the
    filter to a handler.

    Args:
        comm: ChainerMN communicator.
        ranks: The ranks whose messages are all shown.
        level: Messages of this level and above are shown on all ranks.

    Example:
        >>> import logging, sys
        >>> handler = logging.StreamHandler(sys.stdout)
        >>> handler.addFilter(chainermn.RankFilter(comm))
        >>> handler.setFormatter(logging.Formatter('rank %(rank)d: %(message)s'))
        >>> logger = logging.getLogger('my_job')
        >>> logger.addHandler(handler)
        >>> logger.warning('low on memory')  # rank 1 also prints it
        rank 0: low on memory
    """

    def __init__(self, comm: CommunicatorBase, ranks: Collection[int] = (0,),
                 level: int = logging.WARNING) -> None:
        super().__init__()
        self.rank = comm.rank
        self.is_shown = comm.rank in ranks
        self.level = level

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to show a message."""
        record.rank = self.rank
        return self.is_shown or record.levelno >= self.level
