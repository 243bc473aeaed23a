"""The backward pass of recorded functions, one call for each run: see ``recording``.

Before any gradient is computed, the graph is checked. If runs cannot be used, Chainer computes all
gradients.
"""

from __future__ import annotations

import collections
import functools
import heapq
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import chainer
import numpy as np
import torch
from chainer import FunctionNode, Variable, _backprop_utils
from chainer.configuration import config, global_config
from chainer.variable import VariableNode

from chainer_compat.graph import nodes
from chainer_compat.graph.nodes import TensorData
from chainer_compat.graph.settings import raises_errors
from chainer_compat.pytorch.tensors.arrays import array, is_autocast, tensor

#: Runs compute arrays; Chainer's functions compute Variables.
Gradient: TypeAlias = Variable | np.ndarray
Output = tuple[VariableNode, Variable]
Backward = Callable[[list[Output], bool, float | None], None]

_step = _backprop_utils.backprop_step
_accumulate = FunctionNode.backward_accumulate


def gradients(outputs: Sequence[torch.Tensor | torch.autograd.graph.GradientEdge],
              gys: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
              ) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of tensors, and keep the graph.

    Same as ``torch.autograd.grad``, but without importing SymPy, which takes half a second and
    30 MB.
    """
    return torch.autograd.Variable._execution_engine.run_backward(
        tuple(outputs), tuple(gys), True, False, tuple(inputs), True, accumulate_grad=False)


class _Run:
    """The functions of one level."""

    def __init__(self) -> None:
        #: Tensors without history and their nodes, by ID; a node can have several tensors.
        self.leaves: dict[int, tuple[torch.Tensor, VariableNode]] = {}
        #: Nodes whose gradients come from outside the run.
        self.roots: dict[VariableNode, None] = {}

    def gradients(self, grads: _Gradients) -> None:
        """Propagate the gradients of the roots to the leaves."""
        outputs, gys = [], []
        storages = set()
        for node in self.roots:
            gy = grads.pop(node)
            if gy is None:
                continue
            t = _tensor_of(node)
            outputs.append(torch.autograd.graph.GradientEdge(*node._edge) if t is None else t)
            gys.append(tensor(_array_of(gy), channels_last=True))
            storages.add(gys[-1].untyped_storage().data_ptr())
        if not outputs:
            return
        leaves = list(self.leaves.values())
        #: Gradients that were announced during the call of PyTorch, by the ID of the leaf.
        early: dict[int, np.ndarray] = {}

        def own(leaf: torch.Tensor, gx: torch.Tensor) -> np.ndarray:
            gx = _in_format_of(leaf, gx)
            storage = gx.untyped_storage().data_ptr()
            if storage in storages:  # another gradient, of a leaf or an output, uses this memory
                gx = gx.clone()
            storages.add(storage)
            return array(gx)

        def announced(leaf: torch.Tensor, node: VariableNode, gx: torch.Tensor) -> None:
            early[id(leaf)] = own(leaf, gx)
            grads.announce(node, early[id(leaf)])

        hooks = [] if nodes.of_thread.ready is None else [
            leaf.register_hook(functools.partial(announced, leaf, node))
            for leaf, node in leaves if grads.uses[node] == 1 and grads.is_new(node)]
        try:
            found = list(gradients(outputs, gys, [leaf for leaf, _ in leaves]))
        finally:
            for hook in hooks:
                hook.remove()
        found.reverse()  # so that pop() frees each gradient before the next one is copied
        for leaf, node in leaves:
            gx = found.pop()
            if gx is None:
                continue
            result = early.get(id(leaf))
            grads.add(node, own(leaf, gx) if result is None else result)
        if nodes.of_thread.ready is not None:
            grads.used([node for leaf, node in leaves if id(leaf) not in early])


def _in_format_of(leaf: torch.Tensor, gx: torch.Tensor) -> torch.Tensor:
    """Return a gradient with channels last if its leaf has this format, otherwise contiguous."""
    if leaf.ndim != 4 or leaf.is_contiguous() or not leaf.is_contiguous(
            memory_format=torch.channels_last):
        return gx.contiguous()
    return gx.contiguous(memory_format=torch.channels_last)


def _array_of(gradient: Gradient) -> Any:
    return gradient.array if isinstance(gradient, Variable) else gradient


def _variable_of(gradient: Gradient) -> Variable:
    return gradient if isinstance(gradient, Variable) else nodes.variable(gradient, False)


def _tensor_of(node: VariableNode) -> torch.Tensor | None:
    """Return the tensor of an output of a run; ``None`` if it or its history has been freed."""
    y = node._variable()
    data = None if y is None else y._data
    if type(data) is TensorData and data.tensor is not None and data.tensor.requires_grad:
        return data.tensor
    return None


def _has_history(node: VariableNode) -> bool:
    """Return whether a gradient can enter a run at this output."""
    return node._edge is not None or _tensor_of(node) is not None


def _has_other_array(node: VariableNode) -> bool:
    """Return whether user code has replaced the array of an output, so that Chainer must use it."""
    y = node._variable()
    return y is not None and (type(y._data) is not TensorData or y._data.tensor is None)


class _Gradients:
    """Incomplete gradients, by node, and the order in which they are needed."""

    def __init__(self, runs: dict[int, _Run]) -> None:
        self._runs = runs
        #: The number of runs and functions that will add to the gradient of a leaf of runs.
        self.uses = collections.Counter(
            node for run in runs.values() for _, node in run.leaves.values())
        self._grads: dict[VariableNode, Gradient] = {}
        self.leaves: dict[VariableNode, Gradient] = {}
        #: A heap of functions without an entry and of runs; the next one is first. A function of
        #: rank r comes after the runs with a level above r, which may use its outputs.
        self._pending: list[tuple[float, int, FunctionNode | _Run]] = []
        self._seen: set[FunctionNode | int] = set()

    def is_new(self, node: VariableNode) -> bool:
        """Return whether a leaf has no gradient yet, neither from this pass nor an earlier one."""
        x = node._variable()
        return node._creator_node is None and node not in self.leaves and (
            x is None or x.grad_var is None)

    def take(self, node: VariableNode) -> Gradient | None:
        """Remove and return the gradient of a node so far.

        For a leaf, it includes the gradient of earlier passes.
        """
        if node._creator_node is not None:
            return self._grads.pop(node, None)
        if node in self.leaves:
            return self.leaves.pop(node)
        node._check_old_style_gradient()
        return _backprop_utils._grad_var_from_alive_node(node)

    def add(self, node: VariableNode, gx: Gradient) -> None:
        """Add to the gradient of a node."""
        if self.is_new(node):
            node._check_old_style_gradient()
            self.leaves[node] = gx
            return
        known = self.take(node)
        self.put(node, gx if known is None else chainer.functions.add(known, gx))

    def put(self, node: VariableNode, gx: Gradient) -> None:
        """Set the gradient of a node after :meth:`take`."""
        f = node._creator_node
        if f is None:
            self.leaves[node] = gx
            return
        self._grads[node] = gx
        level = f._level
        if level is not None:
            self._runs[level].roots[node] = None
        key = f if level is None else level
        if key not in self._seen:
            self._seen.add(key)
            heapq.heappush(self._pending, (-f.rank - .5, len(self._seen), f) if level is None else (
                -level, len(self._seen), self._runs[level]))

    def used(self, leaves: list[VariableNode]) -> None:
        """Count a use of each leaf, and announce the gradients that are now complete."""
        for node in leaves:
            if node in self.uses:
                self.uses[node] -= 1
                if not self.uses[node] and node in self.leaves:
                    self.announce(node, _array_of(self.leaves[node]))

    def announce(self, node: VariableNode, gradient: np.ndarray) -> None:
        """Pass a complete gradient to the code that waits for it, if any."""
        if nodes.of_thread.ready is not None:
            nodes.of_thread.ready(node, gradient)

    def pop(self, node: VariableNode | None) -> Gradient | None:
        """Remove and return the gradient of a node that is not a leaf."""
        return None if node is None else self._grads.pop(node, None)

    def next(self) -> FunctionNode | _Run | None:
        """Remove and return the next function or run; the gradients of its outputs are complete."""
        return heapq.heappop(self._pending)[2] if self._pending else None


class _FunctionsBehind:
    """The functions that outputs depend on: runs by level, and others.

    Args:
        outputs: The nodes from which gradients are propagated.

    Attributes:
        is_usual: Whether runs can compute the gradients.
        others: The inputs of the functions that are in no run.
    """

    def __init__(self, outputs: list[Output]) -> None:
        self.runs: dict[int, _Run] = {}
        self.is_usual = True
        self.others: list[VariableNode] = []
        seen: set[FunctionNode] = set()
        pending: list[FunctionNode] = []

        def enter(node: VariableNode, creator: FunctionNode) -> None:
            if creator._level is not None and not _has_history(node):
                self.is_usual = False  # the graph has changed since the forward pass
            if creator not in seen:
                seen.add(creator)
                pending.append(creator)

        for node, _ in outputs:
            if node._creator_node is not None:
                enter(node, node._creator_node)
        while pending:
            f = pending.pop()
            level = f._level
            if f._local_function_hooks or f.lazy_grad_sum:
                self.is_usual = False
            if level is None:
                self.others += dict.fromkeys(f.inputs)
                for node in f.inputs:
                    if node._creator_node is not None and node._requires_grad:
                        enter(node, node._creator_node)
                continue
            if 'backward' in f.__dict__:
                self.is_usual = False
            run = self.runs.get(level)
            if run is None:
                run = self.runs[level] = _Run()
            leaves = f._leaves
            for reference in f.outputs:
                node = reference()
                if node is not None and _has_other_array(node):
                    self.is_usual = False
            for i, node in enumerate(f.inputs):
                creator = node._creator_node
                if i in leaves:
                    leaf, array_of_leaf, _ = leaves[i]
                    x = node._variable()
                    if x is not None and (_has_other_array(node) if array_of_leaf is None
                                          else x._data[0] is not array_of_leaf):
                        self.is_usual = False
                    if leaf is not None and leaf.requires_grad:
                        run.leaves[id(leaf)] = leaf, node
                    if creator is not None and node._requires_grad:
                        enter(node, creator)
                elif node._requires_grad:
                    if creator is None or creator._level != level:
                        self.is_usual = False  # the graph has changed since the forward pass
                    elif creator not in seen:
                        seen.add(creator)
                        pending.append(creator)


def _is_watch() -> bool:
    """Return whether ``backprop_step`` is wrapped by code to which runs announce gradients."""
    return getattr(_backprop_utils.backprop_step, 'uses_ready', False)


def by_runs(original: Backward) -> Backward:
    """Return a propagation of gradients like Chainer's, with one call for each run of functions.

    Args:
        original: ``_backprop._backprop_to_all``.
    """

    @functools.wraps(original)
    def backprop_to_all(outputs: list[Output], retain_grad: bool, loss_scale: float | None) -> None:
        local = config._local.__dict__
        mode = local.get('use_torch', global_config.use_torch)
        if (not retain_grad and all([gy is not None for _, gy in outputs])
                and mode in ('auto', 'always') and nodes.is_gradient_only()
                and (_backprop_utils.backprop_step is _step or _is_watch())
                and not raises_errors() and not is_autocast()
                and FunctionNode.backward_accumulate is _accumulate):
            behind = _FunctionsBehind(outputs)
            if behind.is_usual and behind.runs:
                _propagate(behind, outputs, loss_scale)
                return
        original(outputs, retain_grad, loss_scale)

    return backprop_to_all


def _propagate(behind: _FunctionsBehind, outputs: list[Output], loss_scale: float | None) -> None:
    """Compute the gradients of all leaves of the graph, and set them."""
    grads = _Gradients(behind.runs)
    if nodes.of_thread.ready is not None:
        for node in behind.others:
            if node in grads.uses:
                grads.uses[node] += 1
    for node, gy in outputs:
        grads.add(node, gy)
    while (part := grads.next()) is not None:
        if isinstance(part, _Run):
            part.gradients(grads)
        else:
            _propagate_through(part, grads)
    for node, gx in grads.leaves.items():
        x = node._variable()
        if x is not None:
            nodes.set_gradient(x, gx)
            x._loss_scale = loss_scale


def _propagate_through(f: FunctionNode, grads: _Gradients) -> None:
    """Propagate the gradients of the outputs of one function to its inputs, as Chainer does."""
    inputs = f.inputs
    indexes = tuple([i for i, x in enumerate(inputs) if x._requires_grad])
    out_grad = tuple([None if gy is None else _variable_of(gy)
                      for gy in [grads.pop(y()) for y in f.outputs]])
    if not indexes:
        return
    needed = dict.fromkeys([inputs[i] for i in indexes])
    in_grad = {x: [] if gx is None else [_variable_of(gx)]
               for x, gx in [(x, grads.take(x)) for x in needed]}
    with nodes.device_context([x.data for x in inputs] + [
            None if g is None else g.raw_array for g in out_grad]):
        _backprop_utils.backprop_step(f, indexes, out_grad, in_grad, False)
    for x, gx in in_grad.items():
        for each in gx:
            chainer.variable._check_grad_type(f, x, True, each.raw_array)
            grads.put(x, each)
    grads.used(list(in_grad))
