"""Runs of a converted module that can be compared with Chainer's, and their gradients.

A run does not draw random numbers: it uses the random numbers of Chainer's run.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import numpy as np
import torch
from torch import fx

from chainer_compat.pytorch.conversion.references import TracedCall, flattened, mapped
from chainer_compat.pytorch.conversion.tracked_array import Array
from chainer_compat.pytorch.expressions.noise import DRAWN, RANDOM


def run_module(module: torch.nn.Module, calls: list[TracedCall], inputs: tuple[Any, ...]) -> Any:
    """Return the outputs of a module, with the random numbers of these functions, if any."""
    if calls:
        return ModuleRun(module, calls).run(*tensors(inputs))
    return module(*tensors(inputs))


def run_one_by_one(module: torch.nn.Module, calls: list[TracedCall], inputs: tuple[Any, ...],
                   gradients: bool, noise: float) -> list[tuple[int, str, Array, Array]]:
    """Return the results of :class:`OneByOne`."""
    run = OneByOne(module, calls, gradients, noise)
    with torch.set_grad_enabled(gradients):
        run.run(*tensors(inputs))
    return run.found


def gradients_of(module: torch.nn.Module, outputs: Any) -> dict[str, Array]:
    """Return the gradients of all parameters."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    tensors = [y for y in flattened(outputs) if torch.is_tensor(y) and y.requires_grad]
    if not tensors:
        return {name: np.zeros(tuple(p.shape), as_array(p).dtype) for name, p in parameters.items()}
    total = sum((y * torch.from_numpy(direction(tuple(y.shape))).to(y.dtype)).sum()
                for y in tensors)
    gradients = torch.autograd.grad(
        total, list(parameters.values()), allow_unused=True)
    return {name: np.zeros(tuple(p.shape), as_array(p).dtype) if g is None else as_array(g)
            for (name, p), g in zip(parameters.items(), gradients, strict=True)}


def direction(shape: tuple[int, ...]) -> Array:
    """Return weights for outputs. They are random, so that errors do not cancel out."""
    return np.random.RandomState(1).uniform(-1, 1, shape)


@contextlib.contextmanager
def unchanged(module: torch.nn.Module, train: bool) -> Iterator[None]:
    """Restore the mode and the buffers of a module at the end."""
    mode = module.training
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    module.train(train)
    try:
        yield
    finally:
        module.train(mode)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def tensors(inputs: tuple[Any, ...]) -> Any:
    """Return the inputs, with arrays and variables copied to tensors."""
    return mapped(inputs, lambda x: torch.from_numpy(np.array(as_array(x))) if isinstance(
        x, np.ndarray | chainer.Variable) else x)


def as_array(value: Any) -> Array:
    """Return a variable, a tensor or a number as an array."""
    if isinstance(value, chainer.Variable):
        return value._data[0]
    return value.detach().numpy() if torch.is_tensor(value) else np.asarray(value)


class ModuleRun(fx.Interpreter):
    """Runs a module with the random numbers that Chainer drew.

    Args:
        module: A converted module.
        calls: The functions of Chainer's run.
        on_output: Function that is called with the position of a function, the index of an output,
            and its value. It returns the value that is passed to the next functions.
    """

    def __init__(self, module: fx.GraphModule, calls: list[TracedCall],
                 on_output: Callable[[int, int, Any], Any] | None = None) -> None:
        super().__init__(module)
        self._calls, self._on_output = calls, on_output

    def run_node(self, node: fx.Node) -> Any:
        """Compute a node without drawing random numbers."""
        position = node.meta.get('chainer_function')
        if position is not None and node.target in RANDOM:
            call = self._calls[position]
            args = self.map_nodes_to_values(node.args, node)
            value = DRAWN[call.name](call.function, args[0])
        else:
            value = super().run_node(node)
        if self._on_output is not None and 'chainer_output' in node.meta:
            function, index = node.meta['chainer_output']
            value = self._on_output(function, index, value)
        return value


class OneByOne(ModuleRun):
    """Runs each function, and computes its gradients, from the values of Chainer's run.

    Args:
        module: A converted module.
        calls: The functions of Chainer's run.
        gradients: Whether to compute gradients.
        noise: The relative size of random changes to the inputs. If it is not zero, only PyTorch
            computes gradients.
    """

    def __init__(self, module: fx.GraphModule, calls: list[TracedCall], gradients: bool,
                 noise: float) -> None:
        super().__init__(module, calls)
        self.garbage_collect_values = False
        self.found: list[tuple[int, str, Array, Array]] = []
        self._gradients, self._noise = gradients, noise
        self._generator = torch.Generator().manual_seed(0)
        self._computed: dict[int, dict[fx.Node, Any]] = {}

    def run_node(self, node: fx.Node) -> Any:
        """Compute a node; if it is the last output of a function, compare that function."""
        value = super().run_node(node)
        if 'chainer_output' not in node.meta:
            return value
        position, index = node.meta['chainer_output']
        call = self._calls[position]
        self.found.append((position, '', as_array(value), call.outputs[index]))
        computed = self._computed.setdefault(position, {})
        computed[node] = value
        if len(computed) < len(call.outputs):
            return value  # the expression may use it
        if self._gradients and call.node is not None:
            self._compare_gradient(position, call, node.meta['chainer_inputs'])
        for other in computed:
            self.env[other] = self._exact(call.outputs[other.meta['chainer_output'][1]])
        return self.env[node]

    def _exact(self, array: Array) -> Any:
        """Return an output of Chainer as the input of the next functions."""
        result = torch.from_numpy(np.array(array))
        if not result.is_floating_point():
            return result
        if self._noise:
            result *= 1 + self._noise * torch.randn(result.shape, generator=self._generator)
        return result.requires_grad_(self._gradients)

    def _compare_gradient(self, position: int, call: TracedCall, sources: list[fx.Node | None]
                          ) -> None:
        computed = {node.meta['chainer_output'][1]: value
                    for node, value in self._computed[position].items()}
        outputs = [computed[i] for i in range(len(call.outputs))]
        used = [y.requires_grad for y in outputs]
        wanted: dict[fx.Node, list[int]] = {}
        for i, source in enumerate(sources):
            x = None if source is None else self.env.get(source)
            if source is not None and isinstance(x, torch.Tensor) and x.is_leaf and (
                    x.requires_grad):
                wanted.setdefault(source, []).append(i)
        if not wanted or not any(used) or call.node is None or call.node.inputs is None:
            return
        directions = [direction(y.shape).astype(y.dtype) for y in call.outputs]
        expected = {} if self._noise else _vector_jacobian_product(
            call.node, directions, used, [i for indexes in wanted.values() for i in indexes])
        actual = torch.autograd.grad(
            [y for y, is_used in zip(outputs, used, strict=True) if is_used],
            [self.env[source] for source in wanted],
            [torch.from_numpy(d) for d, is_used in zip(directions, used, strict=True) if is_used],
            allow_unused=True, retain_graph=True)
        for (source, indexes), gradient in zip(wanted.items(), actual, strict=True):
            x = as_array(self.env[source])
            parts = [expected[i] for i in indexes if i in expected]
            self.found.append((
                position, f', gradient of input {indexes[0]}',
                np.zeros_like(x) if gradient is None else as_array(gradient),
                functools.reduce(operator.add, parts) if parts else np.zeros_like(x)))


def _vector_jacobian_product(node: chainer.FunctionNode, directions: list[Array],
                             used: list[bool], indexes: list[int]) -> dict[int, Array]:
    """Return the gradients of some inputs of a Chainer function."""
    gradients = tuple(chainer.Variable(d.copy()) if is_used else None
                      for d, is_used in zip(directions, used, strict=True))
    with chainer.using_config('use_torch', 'never'), chainer.using_config('enable_backprop', False):
        found = node.backward_accumulate(tuple(indexes), gradients, (None,) * len(indexes))
    return {i: g.array for i, g in zip(indexes, found, strict=True) if g is not None}
