"""The node monitor: a process per node that outlives the ranks, and reports which failed first.

A rank that is killed by a signal reports nothing, and mpiexec kills the other ranks before they
can.  The interface has three functions, which only ``shutdown`` calls:

- :func:`register`, collective: starts the monitor of each node that has none, and connects to it;
- :func:`wait_until_ready`: waits until the monitor polls the ranks;
- :func:`deregister`: this rank has finished, so the monitor no longer reports its exit.

``rank_client`` runs in each rank.  ``monitor_process`` is the program of the monitor; it uses only
the standard library.  The reasons and measurements are in docs/developers.md.
"""
from __future__ import annotations

from chainermn._diagnostics.node_monitor.rank_client import (
    deregister,
    register,
    wait_until_ready,
)

__all__ = ['deregister', 'register', 'wait_until_ready']
