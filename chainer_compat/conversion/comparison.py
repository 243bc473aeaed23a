"""Compare a converted module with its Chainer model: functions, outputs, gradients, one step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import numpy as np
import torch
from torch import fx

from chainer_compat.conversion import state
from chainer_compat.conversion.expressions.noise import DRAWN, RANDOM
from chainer_compat.conversion.tracing import Trace, TracedCall, flattened, mapped, trace
from chainer_compat.conversion.tracked_array import Array

#: Differences that rounding explains, relative to the largest element, by dtype.
ROUNDING = {'float16': 2e-2, 'float32': 2e-5, 'float64': 1e-9}

#: Larger differences are compared with those that rounding of all values causes, times this.
AMPLIFIED = 20.

LEARNING_RATE = .01


@dataclasses.dataclass
class Comparison:
    """The largest differences between a model and a module, relative to the largest elements.

    Attributes:
        functions: The difference of each function and its gradients, computed from Chainer's own
            inputs.
        outputs: The difference of each output.
        gradients: The difference of each parameter's gradient.
        step: The difference of each parameter after one step of SGD, and of each persistent value.
        first_difference: The first function, output, gradient or value that differs by more than
            rounding explains; ``None`` if all are equal.
    """

    functions: dict[str, float] = dataclasses.field(default_factory=dict)
    outputs: dict[str, float] = dataclasses.field(default_factory=dict)
    gradients: dict[str, float] = dataclasses.field(default_factory=dict)
    step: dict[str, float] = dataclasses.field(default_factory=dict)
    first_difference: str | None = None

    def __str__(self) -> str:
        rows = [f'{name}: {max(values.values()):.1e}' for name, values in (
            ('functions', self.functions), ('outputs', self.outputs),
            ('gradients', self.gradients), ('step', self.step)) if values]
        verdict = f'First difference: {self.first_difference}' if self.first_difference else 'Equal'
        return f'{verdict} (largest relative differences: {", ".join(rows) or "none"})'


def compare(model: chainer.Link, module: torch.nn.Module, *inputs: Any, train: bool | None = None,
            call: Callable[..., Any] | None = None) -> Comparison:
    """Compare a module with the model that it was converted from.

    Both compute outputs, the gradients of all parameters, and one training step of SGD. In a
    converted module, the functions are also compared one by one, with Chainer's inputs. Neither
    the model nor the module is changed.

    Args:
        model: A Chainer model on the CPU.
        module: A module with the same names of parameters.
        inputs: Arguments of the model: NumPy arrays, variables, numbers, or lists of them.
        train: The mode; that of the module by default.
        call: What to run instead of the model, such as ``model.predict``.

    Returns:
        The differences. ``first_difference`` is ``None`` if rounding explains all of them.
    """
    train = module.training if train is None else train
    run = trace(model, inputs, train, call)
    return compare_run(model, module, run, inputs, train)


def compare_run(model: chainer.Link, module: torch.nn.Module, run: Trace, inputs: tuple[Any, ...],
                train: bool, gradients: bool = True) -> Comparison:
    """Compare a module with a run of its model."""
    result = Comparison()
    calls = run.needed()
    is_marked = isinstance(module, fx.GraphModule) and any(
        'chainer_output' in node.meta for node in module.graph.nodes)
    if not is_marked:
        calls = []
    if calls:
        with _unchanged(module, train):
            _compare_functions(result, module, calls, inputs)
    with _unchanged(module, train):
        expected = [_array(y) for y in flattened(run.variables)]
        outputs = _run(module, calls, inputs)
        actual_gradients = _backward(module, outputs) if gradients else {}
        names = [f'output {i}' for i in range(len(expected))]
        actual = flattened(outputs)
        noise = _Noise(module, calls, inputs)
        _compare_all(result, result.outputs, names, actual, expected,
                     lambda i: noise.outputs[i])
        if gradients:
            _compare_gradients(result, model, module, run, actual_gradients, noise)
            if train:
                buffers = dict(module.named_buffers())
                names = [name for name in run.state if name in buffers
                         and buffers[name].is_floating_point()]
                _compare_all(result, result.step, names, [buffers[name] for name in names],
                             [run.state[name] for name in names],
                             lambda i: max(noise.outputs, default=0.))
    return result


def difference(actual: Any, expected: Any, least: float = 0.) -> float:
    """Return the largest difference of two arrays, relative to the largest element.

    Args:
        actual: An array or tensor.
        expected: An array.
        least: A lower bound of the largest element, for values that cancel each other.
    """
    actual, expected = _array(actual), _array(expected)
    if actual.shape != expected.shape:
        return float('inf')
    if not expected.size:
        return 0.
    if expected.dtype.kind not in 'fc':
        return 0. if np.array_equal(actual, expected) else 1.
    if not np.array_equal(np.isfinite(actual), np.isfinite(expected)):
        return float('inf')
    finite = np.isfinite(expected)
    if not np.array_equal(actual[~finite], expected[~finite], equal_nan=True):
        return float('inf')
    if not finite.any():
        return 0.
    largest = max(np.abs(expected[finite]).max(), least)
    error = np.abs(actual[finite].astype(np.float64) - expected[finite]).max()
    return float(error / largest) if largest else float(error)


class _Run(fx.Interpreter):
    """Runs a module with the random numbers that Chainer drew.

    Args:
        module: A converted module.
        calls: The functions of Chainer's run.
        on_output: Called with the position of a function, the index of an output, and its value;
            returns what the next functions get.
    """

    def __init__(self, module: fx.GraphModule, calls: list[TracedCall],
                 on_output: Callable[[int, int, Any], Any] | None = None) -> None:
        super().__init__(module)
        self._calls, self._on_output = calls, on_output

    def run_node(self, node: fx.Node) -> Any:
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


class _Noise:
    """How much outputs and gradients change if all values are rounded differently.

    Nothing is computed until a difference is large enough to ask.
    """

    def __init__(self, module: torch.nn.Module, calls: list[TracedCall], inputs: tuple[Any, ...]
                 ) -> None:
        self._module, self._calls, self._inputs = module, calls, inputs
        self._runs: list[tuple[list[Array], dict[str, Array]]] | None = None

    @functools.cached_property
    def outputs(self) -> list[float]:
        """The change of each output."""
        first, second = self._both()
        return [difference(a, b) for a, b in zip(first[0], second[0], strict=True)]

    @functools.cached_property
    def gradients(self) -> dict[str, float]:
        """The change of each gradient."""
        first, second = self._both()
        least = _least(first[1])
        return {name: difference(first[1][name], second[1][name], least) for name in first[1]}

    def _both(self) -> list[tuple[list[Array], dict[str, Array]]]:
        if self._runs is None:
            self._runs = [self._once(0.), self._once(3e-7)]
        return self._runs

    def _once(self, scale: float) -> tuple[list[Array], dict[str, Array]]:
        generator = torch.Generator().manual_seed(0)

        def changed(value: Any) -> Any:
            if not torch.is_tensor(value) or value.dtype != torch.float32:
                return value
            return value * (1 + scale * torch.randn(value.shape, generator=generator))

        with _unchanged(self._module, self._module.training):
            with torch.no_grad():
                saved = [(p, p.clone()) for p in self._module.parameters()]
                for p, _ in saved:
                    p.copy_(changed(p))
            inputs = mapped(_tensors(self._inputs), changed)
            if self._calls:
                outputs = _Run(self._module, self._calls,
                               lambda k, i, value: changed(value)).run(*inputs)
            else:
                outputs = self._module(*inputs)
            gradients = _backward(self._module, outputs)
            arrays = [_array(y) for y in flattened(outputs)]
            with torch.no_grad():
                for p, value in saved:
                    p.copy_(value)
        return arrays, gradients


class _OneByOne(_Run):
    """Runs each function with Chainer's inputs, and the gradients of its outputs with Chainer's.

    Args:
        module: A converted module.
        calls: The functions of Chainer's run.
        noise: The relative size of random changes of the inputs.
    """

    def __init__(self, module: fx.GraphModule, calls: list[TracedCall], noise: float = 0.) -> None:
        super().__init__(module, calls)
        self.garbage_collect_values = False
        self.found: list[tuple[int, str, Array, Array]] = []
        self._noise = noise
        self._generator = torch.Generator().manual_seed(0)
        self._computed: dict[int, dict[fx.Node, Any]] = {}

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if 'chainer_output' not in node.meta:
            return value
        position, index = node.meta['chainer_output']
        call = self._calls[position]
        self.found.append((position, '', _array(value), call.outputs[index]))
        computed = self._computed.setdefault(position, {})
        computed[node] = value
        if len(computed) < len(call.outputs):
            return value  # the expression may use it
        if call.node is not None:
            self._compare_gradient(position, call, node.meta['chainer_inputs'])
        for other in computed:
            self.env[other] = self._exact(call.outputs[other.meta['chainer_output'][1]])
        return self.env[node]

    def _exact(self, array: Array) -> Any:
        """Return an output of Chainer for the next functions."""
        result = torch.from_numpy(np.array(array))
        if not result.is_floating_point():
            return result
        if self._noise:
            result *= 1 + self._noise * torch.randn(result.shape, generator=self._generator)
        return result.requires_grad_()

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
        directions = [_direction(y.shape).astype(y.dtype) for y in call.outputs]
        expected = _vector_jacobian_product(
            call.node, directions, used, [i for indexes in wanted.values() for i in indexes])
        actual = torch.autograd.grad(
            [y for y, is_used in zip(outputs, used, strict=True) if is_used],
            [self.env[source] for source in wanted],
            [torch.from_numpy(d) for d, is_used in zip(directions, used, strict=True) if is_used],
            allow_unused=True, retain_graph=True)
        for (source, indexes), gradient in zip(wanted.items(), actual, strict=True):
            x = self.env[source]
            zero = np.zeros(tuple(x.shape), _array(x).dtype)
            self.found.append((
                position, f', gradient of input {indexes[0]}',
                zero if gradient is None else _array(gradient),
                sum((expected[i] for i in indexes if i in expected), zero)))


def _vector_jacobian_product(node: chainer.FunctionNode, directions: list[Array],
                             used: list[bool], indexes: list[int]) -> dict[int, Array]:
    """Return the gradients of some inputs of a function of Chainer."""
    gradients = tuple(chainer.Variable(d.copy()) if is_used else None
                      for d, is_used in zip(directions, used, strict=True))
    with chainer.using_config('use_torch', 'never'), chainer.using_config('enable_backprop', False):
        found = node.backward_accumulate(tuple(indexes), gradients, (None,) * len(indexes))
    return {i: g.array for i, g in zip(indexes, found, strict=True) if g is not None}


def _compare_functions(result: Comparison, module: torch.nn.Module, calls: list[TracedCall],
                       inputs: tuple[Any, ...]) -> None:
    """Compare each function and its gradient, computed from Chainer's inputs."""
    found = _one_by_one(module, calls, inputs, 0.)
    noise: list[float] = []

    def rounding(i: int) -> float:
        if not noise:
            changed = _one_by_one(module, calls, inputs, 1.2e-7)
            noise.extend(difference(one[2], other[2], _size_of_inputs(calls[one[0]]))
                         for one, other in zip(changed, found, strict=True))
        return noise[i]

    _compare_all(result, result.functions, [calls[k].label + what for k, what, _, _ in found],
                 [actual for *_, actual, _ in found], [expected for *_, expected in found],
                 rounding, [_size_of_inputs(calls[k]) for k, *_ in found])


def _one_by_one(module: torch.nn.Module, calls: list[TracedCall], inputs: tuple[Any, ...],
                noise: float) -> list[tuple[int, str, Array, Array]]:
    with _unchanged(module, module.training):
        run = _OneByOne(module, calls, noise)
        run.run(*_tensors(inputs))
        return run.found


def _size_of_inputs(call: TracedCall) -> float:
    """Return a lower bound for differences of a function's outputs that are nearly zero."""
    sizes = [np.abs(x).max() for x in call.in_arrays if x.dtype.kind == 'f' and x.size]
    return float(1e-5 * max(sizes)) if sizes and np.isfinite(sizes).all() else 0.


def _least(gradients: dict[str, Array]) -> float:
    """Return a lower bound for differences of gradients: some are zero but for rounding."""
    return 1e-4 * max((float(np.abs(g).max()) for g in gradients.values() if g.size), default=0.)


def _compare_gradients(result: Comparison, model: chainer.Link, module: torch.nn.Module,
                       run: Trace, actual: dict[str, Array], noise: _Noise) -> None:
    """Compare gradients, and parameters after one step of SGD."""
    variables = [y for y in flattened(run.variables)
                 if isinstance(y, chainer.Variable) and y.dtype.kind == 'f'
                 and y.creator_node is not None]
    parameters = state.parameters(model)
    saved = {name: p.grad_var for name, p in parameters.items()}
    with chainer.using_config('use_torch', 'never'):
        for p in parameters.values():
            p.cleargrad()
        if variables:
            total = sum(chainer.functions.sum(y * _direction(y.shape).astype(y.dtype))
                        for y in variables)
            total.backward()
    expected = {name: np.zeros_like(p.array) if p.grad is None else p.grad
                for name, p in parameters.items()}
    for name, p in parameters.items():
        p.grad_var = saved[name]
    # Deep networks amplify rounding without limit; their functions have been compared one by one.
    largest = float('inf') if result.functions else .01
    names = [name for name in reversed(list(expected)) if name in actual]
    missing = expected.keys() - actual.keys()
    if missing and result.first_difference is None:
        result.first_difference = f'parameter {min(missing)} is missing'
    _compare_all(result, result.gradients, [f'gradient of {name}' for name in names],
                 [actual[name] for name in names], [expected[name] for name in names],
                 lambda i: noise.gradients[names[i]], [_least(expected)] * len(names), largest)
    tensors = dict(module.named_parameters(remove_duplicate=False))
    stepped = [tensors[name].detach() - LEARNING_RATE * torch.from_numpy(actual[name])
               for name in names]
    updates = [parameters[name].array - LEARNING_RATE * expected[name] for name in names]
    _compare_all(result, result.step, names, stepped, updates,
                 lambda i: noise.gradients[names[i]],
                 [LEARNING_RATE * _least(expected)] * len(names), largest)


def _backward(module: torch.nn.Module, outputs: Any) -> dict[str, Array]:
    """Return the gradients of all parameters."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    tensors = [y for y in flattened(outputs) if torch.is_tensor(y) and y.requires_grad]
    if not tensors:
        return {name: np.zeros(tuple(p.shape), _array(p).dtype) for name, p in parameters.items()}
    total = sum((y * torch.from_numpy(_direction(tuple(y.shape))).to(y.dtype)).sum()
                for y in tensors)
    gradients = torch.autograd.grad(
        total, list(parameters.values()), allow_unused=True)
    return {name: np.zeros(tuple(p.shape), _array(p).dtype) if g is None else _array(g)
            for (name, p), g in zip(parameters.items(), gradients, strict=True)}


def _direction(shape: tuple[int, ...]) -> Array:
    """Return weights of outputs: random, so that errors do not cancel."""
    return np.random.RandomState(1).uniform(-1, 1, shape)


def _compare_all(result: Comparison, into: dict[str, float], names: list[str], actual: list[Any],
                 expected: list[Any], rounding: Callable[[int], float],
                 least: list[float] | None = None, largest: float = .01) -> None:
    if len(actual) != len(expected):
        result.first_difference = result.first_difference or (
            f'{len(actual)} outputs instead of {len(expected)}')
        return
    for i, name in enumerate(names):
        error = difference(actual[i], expected[i], least[i] if least else 0.)
        into[name] = max(error, into.get(name, 0.))
        limit = ROUNDING.get(_array(expected[i]).dtype.name, 0.)
        is_rounding = error <= limit or (
            limit and error < largest and error <= AMPLIFIED * rounding(i))
        if not is_rounding and result.first_difference is None:
            result.first_difference = f'{name} by {error:.1e}, relative to its largest element'


@contextlib.contextmanager
def _unchanged(module: torch.nn.Module, train: bool) -> Iterator[None]:
    """Restore mode and buffers."""
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


def _run(module: torch.nn.Module, calls: list[TracedCall], inputs: tuple[Any, ...]) -> Any:
    if calls:
        return _Run(module, calls).run(*_tensors(inputs))
    return module(*_tensors(inputs))


def _tensors(inputs: tuple[Any, ...]) -> Any:
    return mapped(inputs, lambda x: torch.from_numpy(np.array(_array(x))) if isinstance(
        x, np.ndarray | chainer.Variable) else x)


def _array(value: Any) -> Array:
    if isinstance(value, chainer.Variable):
        return value._data[0]
    return value.detach().numpy() if torch.is_tensor(value) else np.asarray(value)
