"""The inputs of a module, with checks that they match the example inputs of the conversion."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import chainer
import numpy as np
import torch
from torch import fx

from chainer_compat.pytorch.conversion.errors import ConversionError


def require(graph: fx.Graph, condition: Any, message: Any) -> None:
    """Make the module raise an error unless a condition is true.

    Args:
        graph: The graph of the module.
        condition: The condition, a value of the graph.
        message: The text of the error: a str, or a value of the graph.
    """
    graph.call_function(torch._assert, (
        condition.node, message.node if isinstance(message, fx.Proxy) else message))


def call(root: torch.nn.Module, graph: fx.Graph, tracer: fx.proxy.TracerBase, name: str,
         function: Callable[..., Any], *values: Any) -> Any:
    """Add a call of a function that ``torch.fx`` would evaluate when the module is unpickled.

    The function becomes a submodule, which ``torch.fx`` does not look into.

    Args:
        root: The root of the module.
        graph: The graph of the module.
        tracer: The tracer of the values of the graph.
        name: Name of the submodule.
        function: A function that can be pickled without Chainer.
        values: Its arguments, values of the graph.
    """
    if name not in root._modules:
        submodule = torch.nn.Module()
        submodule.forward = function
        root.add_module(name, submodule)
    return fx.Proxy(graph.call_module(name, tuple(each.node for each in values)), tracer)


def add(root: torch.nn.Module, graph: fx.Graph, tracer: fx.proxy.TracerBase,
        inputs: tuple[Any, ...],
        function: Callable[..., Any], batch: tuple[int, int] | None) -> dict[Any, Any]:
    """Add the inputs, and checks of their shapes.

    Args:
        root: The root of the module.
        graph: The graph of the module.
        tracer: The tracer of the values of the graph.
        inputs: The example inputs of the conversion.
        function: The function of the model that takes them.
        batch: The batch sizes of the two runs; ``None`` if they are the same.

    Returns:
        The arrays as values of the graph, by path.
    """
    proxies: dict[Any, Any] = {}
    batches: list[Any] = []
    hint = '' if batch else (' Convert the model with dynamic_batch=True to accept other batch '
                             'sizes; if that is impossible, the error says why.')

    names = _argument_names(function, len(inputs))

    def add_one(value: Any, path: tuple[Any, ...], proxy: Any) -> None:
        name = names[path[0]] + ''.join(f'[{key!r}]' for key in path[1:])
        if isinstance(value, dict | tuple | list):
            length = fx.Proxy(graph.call_function(len, (proxy.node,)), tracer)
            require(graph, length == len(value),
                    f'Input {name} must have length {len(value)}, as in the conversion.')
            for key in value if isinstance(value, dict) else range(len(value)):
                add_one(value[key], (*path, key), proxy[key])
        elif isinstance(value, np.ndarray | chainer.Variable):
            proxies[path] = proxy
            skipped = 1 if batch and value.ndim and len(value) == batch[0] else 0
            shape = tuple(value.shape[skipped:])
            sizes = ', '.join([*['batch'] * skipped, *map(str, shape)])
            text = (f'Input {name} must have the shape ({sizes}), as in the conversion, not '
                    '{}.' + hint)
            require(graph, call(root, graph, tracer, '_is_tensor', torch.is_tensor, proxy),
                    f'Input {name} must be a torch.Tensor. For a NumPy array, pass '
                    f'torch.from_numpy({name}).')
            require(graph, proxy.shape[skipped:] == shape, call(
                root, graph, tracer, f'_wrong_shape_{len(proxies)}', text.format, proxy.shape))
            if skipped and batches:
                require(graph, proxy.shape[0] == batches[0].shape[0], f'Input {name} must have '
                        'the same batch size as the first array, as in the conversion.')
            if skipped:
                batches.append(proxy)
        elif value is None or isinstance(value, bool | int | float | str | np.generic):
            value = value.item() if isinstance(value, np.generic) else value
            require(graph, proxy == value,
                    f'Argument {name} must be {value!r}, as in the conversion.')
        else:
            raise ConversionError(
                f'Input {name} has the type {type(value).__name__}. Inputs can be NumPy arrays, '
                'variables, numbers, strings, None, and lists, tuples and dicts of them.')

    nodes = [graph.placeholder(name) for name in names]
    for i, (value, node) in enumerate(zip(inputs, nodes, strict=True)):
        add_one(value, (i,), fx.Proxy(node, tracer))
    return proxies


def _argument_names(function: Callable[..., Any], count: int) -> list[str]:
    """Return names for the arguments of the module and the inputs of an ONNX file."""
    names = [name for name, parameter in inspect.signature(function).parameters.items()
             if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)]
    return [names[i] if i < len(names) else f'x{i}' for i in range(count)]
