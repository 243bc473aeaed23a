"""Time limits that fit the machine: ``timeout=seconds(20)``.

A limit must stop programs that hang, but not programs that are slow. Therefore, limits are given in
seconds on a quiet machine with two cores. They are multiplied by the slowness of this machine
(measured when the run starts) or by its current load, whichever is larger.
"""

import os
import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar('_T')

#: Environment variable that passes the measured slowness to the processes of a run.
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
    """Return the time limit for an operation that takes ``quiet`` seconds on a quiet machine."""
    load = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return quiet * max(1., float(os.environ[VARIABLE]), load)


def wait_until(condition: Callable[[], _T], quiet: float = 20) -> _T:
    """Wait until a condition is true, at most ``seconds(quiet)``; return its value."""
    end = time.monotonic() + seconds(quiet)
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(.01)
    return value


if VARIABLE not in os.environ:
    os.environ[VARIABLE] = f'{measure():.2f}'
