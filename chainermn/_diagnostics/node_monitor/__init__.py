"""The node monitor: a process per node that outlives the ranks and reports which failed first.

A rank that is killed by a signal reports nothing, and mpiexec kills the other ranks before they can
report anything. The interface has five functions. ``lifecycle`` calls the following four:

- :func:`prepare`: returns the information that the ranks send to each other;
- :func:`register`: starts the monitor of each node that has none, and connects to it;
- :func:`wait_until_ready`: waits until the monitor polls the ranks;
- :func:`deregister`: this rank has finished, so the monitor no longer reports its exit.

``host_links`` calls :func:`keep_open`: the monitor keeps a connection to another host open, and
sends ``FAILED`` when it exits.

``rank_client`` runs in each rank. ``monitor_process`` is the program that the monitor runs; it uses
only the standard library. docs/developers.md explains why.
"""
from __future__ import annotations

from chainermn._diagnostics.node_monitor.monitor_process import FAILED
from chainermn._diagnostics.node_monitor.rank_client import (
    Registration,
    deregister,
    keep_open,
    prepare,
    register,
    wait_until_ready,
)

__all__ = ['FAILED', 'Registration', 'deregister', 'keep_open', 'prepare', 'register',
           'wait_until_ready']
