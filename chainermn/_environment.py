"""The environment variables of this package: their names, and how their values are read."""
from __future__ import annotations

import os

AGREE = 'CHAINERMN_AGREE'
CUDA_AWARE = 'CHAINERMN_CUDA_AWARE'
DEBUG = 'CHAINERMN_DEBUG'
DEBUG_EVERY = 'CHAINERMN_DEBUG_EVERY'
#: Two spellings of ChainerMN 7; the first one counts.
FORCE_ABORT = ('CHAINERMN_FORCE_ABORT_ON_EXCEPTIONS', 'CHAINERMN_FORCE_ABORT_ON_EXCEPTION')
#: Set by ``python -m chainermn run``: the folder for the reasons why ranks fail.
RUN_FOLDER = 'CHAINERMN_RUN_FOLDER'
TIMELINE = 'CHAINERMN_TIMELINE'
TIMEOUT = 'CHAINERMN_TIMEOUT'


def text(name: str) -> str:
    """Returns the value of a variable, ``''`` if it is not set."""
    return os.environ.get(name, '')


def flag(name: str, default: bool = False) -> bool:
    """Returns whether a variable is on; unset or empty it is the default.

    ``0``, ``false``, ``no`` and ``off`` mean off, in upper or lower case; anything else means on.
    """
    value = text(name).strip().lower()
    return value not in ('0', 'false', 'no', 'off') if value else default
