"""Waits for messages that arrive soon."""
from __future__ import annotations

import os

from chainermn._mpi import MPI

_POLLS = 1000  # a millisecond, if no other process needs the core


def wait(request: MPI.Request, status: MPI.Status | None = None) -> None:
    """Wait for a request: poll first, then block.

    On one node, a message often takes less time than MPI needs to block for it.  If ranks share a
    core, each poll lets another one run.
    """
    test = request.Test
    for _ in range(_POLLS):
        if test(status):
            return
        os.sched_yield()
    request.Wait(status)
