"""Tell the user about an event: by logging, or on stderr if the program has not set up logging."""
from __future__ import annotations

import logging

from chainermn._process import streams


def tell(message: str, *args: object) -> None:
    """Log an event at level INFO to the logger ``chainermn``; without any handler, print it.

    Args:
        message: The message, with placeholders as for ``%``.
        args: Their values.
    """
    logger = logging.getLogger('chainermn')
    if logger.hasHandlers():
        logger.info(message, *args)
    elif logger.isEnabledFor(logging.INFO) or logger.level == logging.NOTSET:
        streams.write(f'chainermn: {message % args}\n')
