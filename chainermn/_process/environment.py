"""Names of this package's environment variables, and functions to read them."""
from __future__ import annotations

import os
from collections.abc import Iterable

from chainer_compat.patching import variables

CUDA_AWARE = 'CHAINERMN_CUDA_AWARE'
DEBUG = 'CHAINERMN_DEBUG'
DEBUG_EVERY = 'CHAINERMN_DEBUG_EVERY'
#: ChainerMN 7 has two spellings; the first takes precedence.
FORCE_ABORT = ('CHAINERMN_FORCE_ABORT_ON_EXCEPTIONS', 'CHAINERMN_FORCE_ABORT_ON_EXCEPTION')
#: Whether deadlocks are detected before the timeout, on the first rank.
DEADLOCKS = 'CHAINERMN_DEADLOCKS'
#: Whether hosts connect to each other, to detect that one is lost.
HOST_LINKS = 'CHAINERMN_HOST_LINKS'
#: The port or path at which each host publishes metrics.
METRICS = 'CHAINERMN_METRICS'
#: Whether ``import chainermn`` finds this package; ``chainer_compat`` reads it.
OVERLAY = 'CHAINERMN_OVERLAY'
#: Folder in which multi-node optimizers record their updates, for ``chainermn compare``.
RECORD = 'CHAINERMN_RECORD'
#: The number of updates from one detailed update to the next.
RECORD_DETAILS = 'CHAINERMN_RECORD_DETAILS'
#: Set by ``chainermn run``: folder where failing ranks write their error messages.
RUN_FOLDER = 'CHAINERMN_RUN_FOLDER'
#: Set by ``chainermn run``: the address at which it accepts a connection from each host.
RUN_LINK = 'CHAINERMN_RUN_LINK'
#: Set by ``chainermn run``: the number of ranks from its option -n.
RUN_RANKS = 'CHAINERMN_RUN_RANKS'
#: Seconds after which waiting ranks print a warning.
STALL_WARNING = 'CHAINERMN_STALL_WARNING'
TIMELINE = 'CHAINERMN_TIMELINE'
TIMEOUT = 'CHAINERMN_TIMEOUT'

KNOWN = frozenset({
    CUDA_AWARE, DEBUG, DEBUG_EVERY, *FORCE_ABORT, DEADLOCKS, HOST_LINKS, METRICS, OVERLAY, RECORD,
    RECORD_DETAILS, RUN_FOLDER, RUN_LINK, RUN_RANKS, STALL_WARNING, TIMELINE, TIMEOUT})
#: The variables that turn something on or off.
FLAGS = CUDA_AWARE, DEBUG, *FORCE_ABORT, DEADLOCKS, HOST_LINKS, OVERLAY
_DEBUG_INTERVAL = 100  # updates
_PREFIX, _OF_TESTS = 'CHAINERMN_', 'CHAINERMN_TEST_'
_SIMILARITY = .7  # without the prefix, TIMOUT and TIMEOUT have 0.92, TIME and TIMEOUT 0.73
_COMPAT_PREFIX = 'CHAINER_'  # shared with variables of Chainer itself and of libraries
_COMPAT_SIMILARITY = .8  # USE_TROCH and USE_TORCH have 0.89, USE_IDEEP and USE_TORCH 0.56


def text(name: str) -> str:
    """Return the value of a variable, or ``''`` if it is not set."""
    return os.environ.get(name, '')


def flag(name: str, default: bool = False) -> bool:
    """Return a variable as a bool, or ``default`` if it is unset or empty.

    Also return ``default`` if the value is neither true nor false, because an error raised here
    might not be caught; :func:`check_flags` reports such a value.
    """
    try:
        return variables.flag(name, default)
    except ValueError:
        return default


def check_flags() -> None:
    """Check the variables that turn something on or off.

    Raises:
        ValueError: If one of them is neither true nor false.
    """
    variables.check(FLAGS)


def debug_interval() -> int:
    """Return after how many updates the models of all ranks are compared again in debug mode.

    Raises:
        ValueError: If the variable is invalid.
    """
    value = text(DEBUG_EVERY) or str(_DEBUG_INTERVAL)
    if not value.isdecimal() or not int(value):
        raise ValueError(f'{DEBUG_EVERY} must be a positive integer (a number of updates), not '
                         f'{value!r}')
    return int(value)


def unknown() -> dict[str, str | None]:
    """Return variables that have no effect although their names resemble ours.

    These are all unknown variables with the prefix of this package, and unknown variables with
    Chainer's prefix if their names closely resemble one of ours.

    Returns:
        The most similar known name for each variable, or ``None`` if no known name is similar.
    """
    found: dict[str, str | None] = {}
    for name in sorted(os.environ):
        if name.startswith(_PREFIX):
            if name not in KNOWN and not name.startswith(_OF_TESTS):
                found[name] = _nearest(name, _PREFIX, KNOWN, _SIMILARITY)
        elif name.startswith(_COMPAT_PREFIX) and name not in variables.KNOWN and (
                nearest := _nearest(name, _COMPAT_PREFIX, variables.KNOWN, _COMPAT_SIMILARITY)):
            found[name] = nearest
    return found


def _nearest(name: str, prefix: str, known: Iterable[str], similarity: float) -> str | None:
    from difflib import get_close_matches  # takes a millisecond

    nearest = get_close_matches(
        name.removeprefix(prefix).upper(), sorted(each.removeprefix(prefix) for each in known), n=1,
        cutoff=similarity)
    return prefix + nearest[0] if nearest else None


def set_mpi_defaults() -> None:
    """Set variables that MPI reads at startup, unless the user has set them.

    UCX, which MPICH uses, closes an idle TCP connection if the other host does not respond for
    about 7 seconds. Even if the host responds later, the next message over the connection causes a
    segmentation fault. With 10 seconds between probes instead of 1, UCX waits for 70 seconds.
    """
    os.environ.setdefault('UCX_TCP_KEEPINTVL', '10s')
    if 'UCX_TLS' in os.environ or 'UCX_NET_DEVICES' in os.environ:
        # UCX warns that the variable is unused if TCP is excluded.
        os.environ.setdefault('UCX_WARN_UNUSED_ENV_VARS', 'n')
