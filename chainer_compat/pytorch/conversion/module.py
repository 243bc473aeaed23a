"""Builds a ``torch.fx`` graph, whose parameters have Chainer's names, from two recorded runs."""

from __future__ import annotations

import functools
import keyword
from collections.abc import Mapping
from typing import Any

import chainer
import numpy as np
import torch
from torch import fx

from chainer_compat.pytorch.conversion import module_inputs, state
from chainer_compat.pytorch.conversion.batch_size import BatchSize
from chainer_compat.pytorch.conversion.errors import ADVICE, ConversionError
from chainer_compat.pytorch.conversion.function_view import FunctionView
from chainer_compat.pytorch.conversion.references import (
    Detached,
    Input,
    Leaf,
    NumpyFunction,
    Output,
    Reference,
    TracedCall,
    flattened,
    identity,
    mapped,
)
from chainer_compat.pytorch.conversion.run_checks import (
    check_equal,
    check_expressions,
    check_outputs,
    differ,
)
from chainer_compat.pytorch.conversion.tracing import Trace
from chainer_compat.pytorch.conversion.tracked_array import Array, plain
from chainer_compat.pytorch.expressions import EXPRESSIONS, NUMPY

#: A submodule that returns its mode. Unlike ``self.training``, it is not constant after torch.load.
MODE = '_is_training'

INFERENCE = ('This module was converted for inference. Convert the model with train=True to train '
             'it.')
TRAINING = ('This module was converted for training, but the model behaves differently in '
            'inference. For inference, convert the model again with train=False.')


class Builder:
    """Builds one module from two runs with different inputs.

    Args:
        runs: Two runs. They must call the same functions; sizes can differ with the batch size.
        batch: The batch sizes of the two runs; ``None`` if they are the same.
        with_gradients: Whether gradients must match Chainer's where maxima are tied.
    """

    def __init__(self, runs: tuple[Trace, Trace], batch: tuple[int, int] | None,
                 with_gradients: bool) -> None:
        first = runs[0]
        self.model, self.runs, self.train = first.model, runs, first.train
        self.with_gradients = with_gradients
        self.root = torch.nn.Module()
        self.graph = fx.Graph()
        self.tracer = _Tracer(self.graph)
        self._parameters = state.parameters(self.model)
        self._names = self._known_arrays()
        self._proxies: dict[Any, Any] = {}
        self._positions: dict[int, int] = {}
        function = first.call or getattr(self.model, 'forward', self.model.__call__)
        self.inputs = module_inputs.add(
            self.root, self.graph, self.tracer, first.inputs, function, batch)
        self.mode = self._add_mode()
        self.batch = BatchSize(next(iter(self.inputs.values())).size(0), batch) if batch else None

    def module(self) -> fx.GraphModule:
        """Return the module.

        Raises:
            ConversionError: If a function cannot be converted, or the runs differ.
        """
        first, second = (run.needed() for run in self.runs)
        check_expressions(first)
        check_equal(first, second)
        self._positions = {id(call): i for calls in (first, second) for i, call in enumerate(calls)}
        if not self.train:
            module_inputs.require(self.graph, self.mode == False, INFERENCE)  # noqa: E712 (a node)
        for position, calls in enumerate(zip(first, second, strict=True)):
            self._add(position, *calls)
        outputs, others = (run.outputs for run in self.runs)
        check_outputs(outputs, others)
        second_outputs = iter(flattened(others))
        self.graph.output(mapped(outputs, lambda each: self._output(each, next(second_outputs))))
        self._remove_unused()
        tensors = self._tensors()
        _add_tensors(self.root, tensors)
        module = fx.GraphModule(self.root, self.graph, type(self.model).__name__)
        _add_tensors(module, tensors)  # including tensors that the graph does not use
        module.meta['chainer_batch'] = self.batch is not None
        return module.train(self.train)

    def forbid_inference(self, module: fx.GraphModule) -> None:
        """Make the module raise an error in inference mode."""
        mode = next(node for node in module.graph.nodes if node.target == MODE)
        with module.graph.inserting_after(mode):
            module.graph.call_function(torch._assert, (mode, TRAINING))
        module.recompile()

    def constant(self, array: Any, name: str = 'constant') -> Any:
        """Return an array as a buffer of the module."""
        number, names = 0, self._names.values()
        while hasattr(self.root, f'{name}_{number}') or f'{name}_{number}' in names:
            number += 1
        self.root.register_buffer(f'{name}_{number}', torch.from_numpy(np.array(plain(array))))
        return self._get(f'{name}_{number}')

    def resolve(self, first: Reference, second: Reference) -> Any:
        """Return the value that both runs refer to.

        Raises:
            ConversionError: If the runs refer to different values.
        """
        if isinstance(first, Leaf) and isinstance(second, Leaf):
            return self._leaf(first.array, second.array)
        if isinstance(first, Detached) and isinstance(second, Detached):
            key = ('detached', _key(first.value))
            if key not in self._proxies:
                self._proxies[key] = self.resolve(first.value, second.value).detach()
            return self._proxies[key]
        if isinstance(first, Input) and first == second:
            return self.inputs[first.path]
        if isinstance(first, Output) and isinstance(second, Output):
            position = self._positions.get(id(first.call))
            if position is not None and position == self._positions.get(id(second.call)) and (
                    first.index == second.index):
                return self._proxies[position][first.index]
        raise differ()

    def merged(self, first: Any, second: Any) -> Any:
        """Return an attribute of a function, with sizes and arrays as values of the graph."""
        if isinstance(first, np.ndarray | chainer.Variable):
            return self.resolve(self.runs[0].reference(first), self.runs[1].reference(second))
        if isinstance(first, np.generic):
            first, second = first.item(), second.item()
        if isinstance(first, slice) and isinstance(second, slice):
            return slice(*self.merged((first.start, first.stop, first.step),
                                      (second.start, second.stop, second.step)))
        if isinstance(first, dict):
            return {key: self.merged(value, second[key]) for key, value in first.items()}
        if isinstance(first, tuple | list):
            if len(first) != len(second):
                raise differ()
            return type(first)(self.merged(*both) for both in zip(first, second, strict=True))
        if self.batch is not None and first != second:
            if type(first) is int and type(second) is int:
                return self.batch.size(first, second)
            if type(first) is float and type(second) is float:
                return self.batch.number(first, second)
        if type(first) is not type(second) or (first != second and first == first):
            raise ConversionError(
                f'one of its arguments depends on the values of the inputs (it was {first!r} and '
                f'{second!r} in two runs), through control flow or numbers that were taken out of '
                f'the graph. {ADVICE}')
        return first

    def is_parameter(self, array: Array) -> bool:
        """Return whether an array belongs to a parameter."""
        return self._names.get(identity(array)) in self._parameters

    def _known_arrays(self) -> dict[Any, str]:
        """Return the names of the model's arrays."""
        arrays = {**state.other_arrays(self.model),
                  **state.persistent_values(self.model),
                  **{name: parameter._data[0]
                     for name, parameter in self._parameters.items()}}
        return {identity(array): name for name, array in arrays.items()}

    def _add_mode(self) -> Any:
        mode = torch.nn.Module()
        mode.forward = functools.partial(getattr, mode, 'training')
        self.root.add_module(MODE, mode)
        return fx.Proxy(self.graph.call_module(MODE), self.tracer)

    def _add(self, position: int, first: TracedCall, second: TracedCall) -> None:
        """Add the expression of one function."""
        previous = len(self.graph.nodes)
        try:
            inputs = [self.resolve(*both)
                      for both in zip(first.inputs, second.inputs, strict=True)]
            view = FunctionView(self, first, second)
            if isinstance(first.function, NumpyFunction):
                args, kwargs = (self.merged(getattr(first.function, name),
                                            getattr(second.function, name))
                                for name in ('args', 'kwargs'))
                outputs = NUMPY[first.function.name](view, *args, **kwargs)
            else:
                outputs = EXPRESSIONS[first.name](view, *inputs)
        except ConversionError as error:
            raise ConversionError(f'{first.label} cannot be converted: {error}.') from None
        except NotImplementedError as error:
            raise ConversionError(
                f'{first.label} has no expression in PyTorch with these options: {error}.'
            ) from None
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise ConversionError(f'{first.label} has no expression in PyTorch with these '
                                  f'arguments: {type(error).__name__}: {error}.') from error
        self._proxies[position] = outputs if isinstance(outputs, tuple) else (outputs,)
        for node in list(self.graph.nodes)[previous:]:
            node.meta['chainer_function'] = position
        sources = [None if _has_no_gradient(reference) else proxy.node
                   for reference, proxy in zip(first.inputs, inputs, strict=True)]
        made = set(list(self.graph.nodes)[previous:])
        for i, proxy in enumerate(self._proxies[position]):
            if proxy.node not in made:  # the function returns its input
                continue
            proxy.node.meta.setdefault('chainer_inputs', sources)
            proxy.node.meta.setdefault('chainer_output', (position, i))

    def _output(self, first: Any, second: Any) -> Any:
        if isinstance(first, Leaf) and identity(first.array) not in self._names:
            raise ConversionError(
                'The model cannot be converted: an output was not computed by Chainer functions. '
                'Use Chainer functions, or use call= to convert a function without this output.')
        value = (self.resolve if isinstance(first, Reference) else self.merged)(first, second)
        return value.node if isinstance(value, fx.Proxy) else value

    def _leaf(self, first: Array, second: Array) -> Any:
        """Return a parameter, persistent value or constant."""
        names = [self._names.get(identity(array)) for array in (first, second)]
        if names[0] is not None and names[0] == names[1]:
            return self._get(names[0])
        if np.array_equal(first, second, equal_nan=first.dtype.kind == 'f'):
            key = ('constant', identity(first))
            if key not in self._proxies:
                self._proxies[key] = self.constant(first)
            return self._proxies[key]
        if self.batch is not None and first.shape != second.shape and first.ndim == second.ndim:
            return self.batch.array(self.constant, first, second)
        raise ConversionError(
            'its input is an array that differs between two runs, but was not computed by '
            'Chainer functions: it is random, or depends on the inputs in a way that cannot be '
            'tracked, such as table[x]. Use Chainer functions, such as F.embed_id(x, table)')

    def _get(self, name: str) -> Any:
        key = ('attribute', name)
        if key not in self._proxies:
            self._proxies[key] = fx.Proxy(self.graph.create_node('get_attr', name), self.tracer)
        return self._proxies[key]

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return parameters, persistent values and other arrays that the graph uses, by name."""
        parameters = {id(p): torch.nn.Parameter(torch.from_numpy(np.array(p._data[0])),
                                                requires_grad=p.dtype.kind == 'f')
                      for p in self._parameters.values()}  # shared parameters stay shared
        used = {node.target for node in self.graph.nodes if node.op == 'get_attr'}
        others = {name: array for name, array in state.other_arrays(self.model).items()
                  if name in used}
        return {**{name: parameters[id(p)] for name, p in self._parameters.items()},
                **{name: torch.from_numpy(np.array(array)) for name, array in {
                    **others, **state.persistent_values(self.model)}.items()}}

    def _remove_unused(self) -> None:
        for node in reversed(self.graph.nodes):
            is_pure = node.op == 'get_attr' or (
                node.op == 'call_function' and node.target is not torch._assert) or (
                node.op == 'call_method' and not node.target.endswith('_'))
            if is_pure and not node.users:
                self.graph.erase_node(node)


class _Tracer(fx.proxy.GraphAppendingTracer):
    def create_arg(self, value: Any) -> Any:
        return super().create_arg(value.item() if isinstance(value, np.generic) else value)


def _has_no_gradient(reference: Reference) -> bool:
    return isinstance(reference, Detached) or (
        isinstance(reference, Output) and isinstance(reference.call.function, NumpyFunction))


def _key(reference: Reference) -> Any:
    if isinstance(reference, Output):
        return id(reference.call), reference.index
    if isinstance(reference, Detached):
        return _key(reference.value)
    return reference.path if isinstance(reference, Input) else identity(reference.array)


def _add_tensors(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Register parameters and buffers by their dotted names.

    Raises:
        ConversionError: If a module cannot have such a name.
    """
    for name, tensor in tensors.items():
        *path, last = name.split('.')
        owner = module
        for part in path:
            if part not in owner._modules:
                _check_name(owner, part, name)
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        if last not in owner._parameters and last not in owner._buffers:
            _check_name(owner, last, name)
        if isinstance(tensor, torch.nn.Parameter):
            owner.register_parameter(last, tensor)
        else:
            owner.register_buffer(last, tensor)


def _check_name(module: torch.nn.Module, part: str, name: str) -> None:
    if hasattr(module, part) or keyword.iskeyword(part):
        raise ConversionError(f'{name} contains a name that PyTorch modules cannot have: {part}. '
                              'Rename this link or parameter.')
