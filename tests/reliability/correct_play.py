"""What random correct programs have in common: delays, and the registry of their parts.

All ranks draw the same random numbers, so each knows what the others do. Per program one delay is
long enough for a wrong alarm; during it the rank sleeps, computes, holds the GIL, is stopped
by a signal, or is in a debugger.
"""

from __future__ import annotations

import ctypes
import os
import pdb
import queue
import random
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

ARRAY = np.ones(5, 'f')
LARGE = np.ones(1 << 19, 'f')
#: By name.
PARTS: dict[str, Callable[[Play], None]] = {}


class Play:
    """The state of a program on a rank.

    Args:
        comm: A communicator.
        second: Another one of the same ranks.
        third: Another one, for threads: only one thread at a time may be in a collective.
    """

    def __init__(self, comm: Any, second: Any, third: Any) -> None:
        self.comm, self.second, self.third = comm, second, third
        self.rank, self.size = comm.rank, comm.size
        self.rng = random.Random()
        self._long = 0.

    def begin(self, seed: str, longest: float) -> list[str]:
        """Draws a program: the names of its parts."""
        self.rng = random.Random(seed)
        self._long = self.rng.uniform(.3, 1) * longest
        return self.rng.sample([*PARTS], 2)

    def seconds(self) -> float:
        """Draws a delay."""
        if self._long and self.rng.random() < .5:
            long, self._long = self._long, 0
            return long
        return self.rng.choice([0, 0, .01, .1, .3])

    def pause(self) -> None:
        """Delays a random rank in a random way. Every rank calls it, in its main thread."""
        rank, seconds, way = self.peer(), self.seconds(), self.rng.choice(WAYS)
        if self.rank == rank and seconds:
            way(seconds)

    def peer(self) -> int:
        """Draws a rank."""
        return self.rng.randrange(self.size)

    def pair(self) -> tuple[int, int]:
        """Draws two ranks."""
        first, second = self.rng.sample(range(self.size), 2)
        return first, second


def part(play: Callable[[Play], None]) -> Callable[[Play], None]:
    """Add a part of programs. Every rank calls it."""
    PARTS[play.__name__] = play
    return play


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        np.linalg.norm(LARGE[:10000])


def hold_the_lock(seconds: float) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def stop(seconds: float) -> None:
    """Another process stops this one, and continues it."""
    subprocess.run(['sh', '-c', f'(kill -STOP {os.getpid()}; sleep {seconds}; '
                    f'kill -CONT {os.getpid()}) > /dev/null 2>&1 &'], check=True)
    time.sleep(.2)


def debug(seconds: float) -> None:
    """The prompt of pdb, until the user continues."""
    with subprocess.Popen(['sh', '-c', f'sleep {seconds}; echo p seconds; echo c'],
                          stdout=subprocess.PIPE, text=True) as user, open(
                              os.devnull, 'w') as screen:
        pdb.Pdb(stdin=user.stdout, stdout=screen, nosigint=True, readrc=False).set_trace()
        user.wait()


def run_a_process(seconds: float) -> None:
    subprocess.run(['sleep', str(seconds)], check=True)


def wait_for_a_queue(seconds: float) -> None:
    """A thread computes the next batch."""
    batches: queue.Queue[int] = queue.Queue()

    def load() -> None:
        time.sleep(seconds)
        batches.put(1)

    threading.Thread(target=load, daemon=True).start()
    batches.get()


WAYS = (time.sleep, compute, hold_the_lock, stop, debug, run_a_process, wait_for_a_queue)
