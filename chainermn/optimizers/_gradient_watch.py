"""Says when the gradient of a parameter is complete, while backward still runs.

Chainer stores the gradients of parameters only at the end of backward.  But each function adds to
them on the way, and once the last one that uses a parameter has run, its gradient is what will be
stored.  So the graph is walked once, ahead of backward, to count those functions; then each step of
backward is looked at.  The graph itself is as ever: the same functions run in the same order.
"""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

from chainer import _backprop_utils

_step = _backprop_utils.backprop_step
_lock = threading.Lock()
_watches = 0  # of all threads
_of_thread = threading.local()


class _Watch:
    """Which functions of a graph are still to add to which gradients."""

    def __init__(self, loss: Any, nodes: Collection[Any], ready: Callable[[Any, Any], None]
                 ) -> None:
        self.ready = ready
        self.adds_to: dict[Any, list[Any]] = {}  # nodes by function
        self.missing = missing = dict[Any, int]()  # functions that add to a node
        found = [loss.node.creator_node]
        seen = set(found)
        while found:
            function = found.pop()
            if function is None:
                continue
            mine = []
            for node in function.inputs:
                if node in nodes:
                    if node.requires_grad and node not in mine:
                        mine.append(node)
                        missing[node] = missing.get(node, 0) + 1
                elif (creator := node.creator_node) is not None and creator not in seen and (
                        node.requires_grad):
                    seen.add(creator)
                    found.append(creator)
            if mine:
                self.adds_to[function] = mine


@contextlib.contextmanager
def watch(loss: Any, nodes: Collection[Any], ready: Callable[[Any, Any], None]
          ) -> Iterator[Collection[Any]]:
    """Watches ``loss.backward()``, of this thread.

    Args:
        loss: The Variable.
        nodes: ``node`` of each parameter to be watched.
        ready: Called as ``ready(node, gradient)`` with an array that will be the gradient, unless
            what runs within backward changes it; nobody will write to it before backward ends.
            It is not called where that is not known, such as for a function that gives no
            gradient for an input.

    Returns:
        A context manager that gives the nodes on which the loss depends.
    """
    watched = _Watch(loss, nodes, ready)
    outer = getattr(_of_thread, 'watch', None)
    _of_thread.watch = watched
    _count(+1)
    try:
        yield watched.missing.keys()
    finally:
        _count(-1)
        _of_thread.watch = outer


def _count(change: int) -> None:
    global _watches
    with _lock:
        _watches += change
        _backprop_utils.backprop_step = _watched_step if _watches else _step


def _watched_step(func: Any, target_input_indexes: Any, grad_outputs: Any, grad_inputs: Any,
                  is_debug: bool) -> None:
    """As Chainer's function of this place, which adds to the lists in ``grad_inputs``."""
    watched = getattr(_of_thread, 'watch', None)
    _of_thread.watch = None  # what a function computes gradients of in its backward is its own
    try:
        _step(func, target_input_indexes, grad_outputs, grad_inputs, is_debug)
    finally:
        _of_thread.watch = watched
    if watched is None:
        return
    for node in watched.adds_to.pop(func, ()):
        watched.missing[node] -= 1
        if not watched.missing[node]:
            gradients = grad_inputs[node]
            if len(gradients) == 1:  # else they are added up later, as configured
                watched.ready(node, gradients[0].array)
