"""Compare a converted module with its Chainer model: functions, outputs, gradients, one step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chainer
import numpy as np
import torch
from torch import fx

from chainer_compat.conversion import state
from chainer_compat.conversion.module_runs import (
    ModuleRun,
    as_array,
    direction,
    gradients_of,
    run_module,
    run_one_by_one,
    tensors,
    unchanged,
)
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
    is_marked = isinstance(module, fx.GraphModule) and any(
        'chainer_output' in node.meta for node in module.graph.nodes)
    return compare_run(module, trace(model, inputs, train, call), by_function=is_marked)


def compare_run(module: torch.nn.Module, run: Trace, by_function: bool = True,
                gradients: bool = True) -> Comparison:
    """Compare a module with a run of its model."""
    result = Comparison()
    calls = run.needed() if by_function else []
    if calls:
        with unchanged(module, run.train):
            _compare_functions(result, module, calls, run.inputs)
    with unchanged(module, run.train):
        expected = [as_array(y) for y in flattened(run.variables)]
        outputs = run_module(module, calls, run.inputs)
        actual_gradients = gradients_of(module, outputs) if gradients else {}
        noise = _Noise(module, calls, run.inputs)
        _compare_all(result, result.outputs, [f'output {i}' for i in range(len(expected))],
                     flattened(outputs), expected, lambda i: noise.outputs[i])
        if gradients:
            _compare_gradients(result, module, run, actual_gradients, noise)
            buffers = dict(module.named_buffers())
            names = [name for name in run.state if name in buffers]
            _compare_all(result, result.step, [f'persistent value {name}' for name in names],
                         [buffers[name] for name in names],
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
    actual, expected = as_array(actual), as_array(expected)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
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

        with unchanged(self._module, self._module.training):
            with torch.no_grad():
                saved = [(p, p.clone()) for p in self._module.parameters()]
                for p, _ in saved:
                    p.copy_(changed(p))
            inputs = mapped(tensors(self._inputs), changed)
            if self._calls:
                outputs = ModuleRun(self._module, self._calls,
                               lambda k, i, value: changed(value)).run(*inputs)
            else:
                outputs = self._module(*inputs)
            gradients = gradients_of(self._module, outputs)
            arrays = [as_array(y) for y in flattened(outputs)]
            with torch.no_grad():
                for p, value in saved:
                    p.copy_(value)
        return arrays, gradients


def _compare_functions(result: Comparison, module: torch.nn.Module, calls: list[TracedCall],
                       inputs: tuple[Any, ...]) -> None:
    """Compare each function and its gradient, computed from Chainer's inputs."""
    found = run_one_by_one(module, calls, inputs, 0.)
    noise: list[float] = []

    def rounding(i: int) -> float:
        if not noise:
            changed = run_one_by_one(module, calls, inputs, 1.2e-7)
            noise.extend(difference(one[2], other[2], _size_of_inputs(calls[one[0]]))
                         for one, other in zip(changed, found, strict=True))
        return noise[i]

    _compare_all(result, result.functions, [calls[k].label + what for k, what, _, _ in found],
                 [actual for *_, actual, _ in found], [expected for *_, expected in found],
                 rounding, [_size_of_inputs(calls[k]) for k, *_ in found])


def _size_of_inputs(call: TracedCall) -> float:
    """Return a lower bound for differences of a function's outputs that are nearly zero."""
    sizes = [np.abs(x).max() for x in call.in_arrays if x.dtype.kind == 'f' and x.size]
    return float(1e-5 * max(sizes)) if sizes and np.isfinite(sizes).all() else 0.


def _least(gradients: dict[str, Array]) -> float:
    """Return a lower bound for differences of gradients: some are zero but for rounding."""
    return max((max(1e-4, 5 * ROUNDING.get(g.dtype.name, 0.)) * float(np.abs(g).max())
                for g in gradients.values() if g.size), default=0.)


def _compare_gradients(result: Comparison, module: torch.nn.Module, run: Trace,
                       actual: dict[str, Array], noise: _Noise) -> None:
    """Compare gradients, and parameters after one step of SGD."""
    variables = [y for y in flattened(run.variables)
                 if isinstance(y, chainer.Variable) and y.dtype.kind == 'f'
                 and y.creator_node is not None]
    parameters = state.parameters(run.model)
    saved = {name: p.grad_var for name, p in parameters.items()}
    with chainer.using_config('use_torch', 'never'):
        for p in parameters.values():
            p.cleargrad()
        if variables:
            total = sum(chainer.functions.sum(y * direction(y.shape).astype(y.dtype))
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
        limit = ROUNDING.get(as_array(expected[i]).dtype.name, 0.)
        is_rounding = error <= limit or (
            limit and error < largest and error <= AMPLIFIED * rounding(i))
        if not is_rounding and result.first_difference is None:
            result.first_difference = f'{name} by {error:.1e}, relative to its largest element'
