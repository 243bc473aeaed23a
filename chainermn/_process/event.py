"""Reports events to the user: through logging, or on stderr if logging is not configured."""
from __future__ import annotations

import logging

from chainermn._process import streams


def tell(message: str, *args: object) -> None:
    """Log an event at level INFO to the logger ``chainermn``; without any handler, print it.

    Args:
        message: The message, with placeholders as for ``%``.
        args: The values of the placeholders.
    """
    logger = logging.getLogger('chainermn')
    if logger.hasHandlers():
        logger.info(message, *args)
    elif logger.isEnabledFor(logging.INFO) or logger.level == logging.NOTSET:
        streams.write(f'chainermn: {message % args}\n')
