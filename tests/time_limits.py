"""Time limits that fit the machine: ``timeout=seconds(20)``.

A limit ends what hangs, and must not end what is slow. So limits are given in seconds of a quiet
machine with two cores, and grow with how slow this one is: measured once, when the run starts, and
with its load since.
"""

import os
import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar('_T')

#: Where a run keeps what it has measured, for the processes that it starts.
VARIABLE = 'CHAINERMN_TEST_SLOWNESS'
QUIET = 0.2  # seconds that counting to LENGTH takes on a quiet machine
LENGTH = 1_000_000


def measure() -> float:
    """Return how many times slower than a quiet machine this one is."""
    start = time.perf_counter()
    for n in range(LENGTH):
        str(n)
    return (time.perf_counter() - start) / QUIET


def seconds(quiet: float) -> float:
    """Return the limit for what may take ``quiet`` seconds on a quiet machine."""
    load = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return quiet * max(1., float(os.environ[VARIABLE]), load)


def wait_until(condition: Callable[[], _T], quiet: float = 20) -> _T:
    """Wait until a condition is true, for so many seconds of a quiet machine; return its value."""
    end = time.monotonic() + seconds(quiet)
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(.01)
    return value


if VARIABLE not in os.environ:
    os.environ[VARIABLE] = f'{measure():.2f}'
