"""Detects when the gradient of a parameter is complete, while the backward pass still runs.

Chainer stores the gradients of parameters only at the end of the backward pass. But a gradient is
complete as soon as all functions that use the parameter have run. So this module walks the graph
before the backward pass to count these functions, and wraps each step of the pass. The graph is not
changed: the same functions run in the same order. If PyTorch computes the gradients of several
functions together, its kernels announce each complete gradient.
"""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator

from chainer import _backprop_utils

from chainer_compat.graph.nodes import of_thread
from chainermn._process import runtime
from chainermn._types import Array, FunctionNode, Variable, VariableNode

_step = _backprop_utils.backprop_step
_of_thread = threading.local()


class _Watches(runtime.ProcessState):
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0  # number of watches in all threads

    def add(self, change: int) -> None:
        with self.lock:
            self.count += change
            _backprop_utils.backprop_step = _watched_step if self.count else _step


class _Watch:
    """The functions of a graph that have not contributed to the gradients yet."""

    def __init__(self, loss: Variable, nodes: Collection[VariableNode],
                 ready: Callable[[VariableNode, Array], None]) -> None:
        self.ready = ready
        self.adds_to: dict[FunctionNode, list[VariableNode]] = {}  # nodes by function
        self.missing = missing = dict[VariableNode, int]()  # number of functions by node
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

    def announced(self, node: VariableNode, gradient: Array) -> None:
        """Handle a complete gradient from PyTorch, which computed several functions together."""
        if node in self.missing:
            self.ready(node, gradient)


@contextlib.contextmanager
def watch(loss: Variable, nodes: Collection[VariableNode],
          ready: Callable[[VariableNode, Array], None]) -> Iterator[Collection[VariableNode]]:
    """Return a context that watches ``loss.backward()`` in this thread.

    Args:
        loss: The loss.
        nodes: The ``node`` of each parameter to watch.
        ready: Function that is called as ``ready(node, gradient)`` as soon as a gradient is
            complete. The array is not written to before the backward pass ends, but code that runs
            during the pass may replace it. The function is not called for all nodes, for example if
            a function of the graph returns no gradient for an input.

    Returns:
        A context manager whose value is the nodes that the loss depends on.
    """
    watched = _Watch(loss, nodes, ready)
    outer = getattr(_of_thread, 'watch', None), of_thread.ready
    _of_thread.watch, of_thread.ready = watched, watched.announced
    watches = runtime.get(_Watches)
    watches.add(+1)
    try:
        yield watched.missing.keys()
    finally:
        watches.add(-1)
        _of_thread.watch, of_thread.ready = outer


def _watched_step(func: FunctionNode, target_input_indexes: tuple[int, ...],
                  grad_outputs: tuple[Variable | None, ...],
                  grad_inputs: dict[VariableNode, list[Variable]], is_debug: bool) -> None:
    """Run Chainer's function, which appends to the lists in ``grad_inputs``."""
    watched: _Watch | None = getattr(_of_thread, 'watch', None)
    ready = of_thread.ready
    # The backward method of a function may run another backward pass.
    _of_thread.watch = of_thread.ready = None
    try:
        _step(func, target_input_indexes, grad_outputs, grad_inputs, is_debug)
    finally:
        _of_thread.watch, of_thread.ready = watched, ready
    if watched is None:
        return
    for node in watched.adds_to.pop(func, ()):
        watched.missing[node] -= 1
        if not watched.missing[node]:
            gradients = grad_inputs[node]
            if len(gradients) == 1:  # otherwise Chainer adds them later
                watched.ready(node, gradients[0].array)


_watched_step.uses_ready = True  # type: ignore[attr-defined]
