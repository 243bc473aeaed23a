"""Compare a converted module with its Chainer model: functions, outputs, gradients, one step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Set
from typing import Any

import chainer
import numpy as np
import torch
from torch import fx

from chainer_compat.pytorch.conversion import state
from chainer_compat.pytorch.conversion.errors import ConversionError, name_of_kind
from chainer_compat.pytorch.conversion.first_run import check_model, first_run
from chainer_compat.pytorch.conversion.module_runs import (
    ModuleRun,
    as_array,
    direction,
    gradients_of,
    run_module,
    run_one_by_one,
    tensors,
    unchanged,
)
from chainer_compat.pytorch.conversion.patches import on_one_rank
from chainer_compat.pytorch.conversion.references import TracedCall, flattened, mapped
from chainer_compat.pytorch.conversion.tracing import Trace
from chainer_compat.pytorch.conversion.tracked_array import Array

#: Differences that rounding explains, relative to the largest element, by dtype.
ROUNDING = {'float16': 2e-2, 'float32': 2e-5, 'float64': 1e-9}

#: Larger differences are compared with the effect of rounding all values, times this factor.
AMPLIFIED = 20.

LEARNING_RATE = .01


@dataclasses.dataclass
class Comparison:
    """The largest differences between a model and a module, relative to the largest elements.

    Attributes:
        functions: The difference of each function and its gradients, computed from the
            inputs that it has in Chainer.
        outputs: The difference of each output.
        gradients: The difference of each parameter's gradient.
        step: The difference of each parameter after one step of SGD, and of each persistent value.
        first_difference: The first function, output, gradient or value that differs by more than
            rounding explains; ``None`` if there is none.
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


@on_one_rank()
def compare(model: chainer.Link, module: torch.nn.Module, *inputs: Any, train: bool | None = None,
            call: Callable[..., Any] | None = None) -> Comparison:
    """Compare a module with the model that it was converted from.

    Both compute outputs, the gradients of all parameters, and one training step of SGD. In a
    converted module, the functions are also compared one by one, with Chainer's inputs. Neither
    the model nor the module is changed.

    Args:
        model: A Chainer model on the CPU.
        module: A module with the same parameter names.
        inputs: Arguments of the model: NumPy arrays, variables, numbers, or lists of them.
        train: Whether to compare in training mode; by default, the mode of the module is used.
        call: Function to run instead of the model, such as ``model.predict``.

    Returns:
        The differences. ``first_difference`` is ``None`` if rounding explains all of them.

    Raises:
        ConversionError: If an argument has the wrong type, or the model cannot be called.
    """
    check_model('compare(model, module, x)', model)
    if not isinstance(module, torch.nn.Module):
        raise ConversionError(
            f'compare: module must be a torch.nn.Module, not {name_of_kind(module)}. The order of '
            'the arguments is compare(model, module, x).')
    train = module.training if train is None else train
    is_marked = isinstance(module, fx.GraphModule) and any(
        'chainer_output' in node.meta for node in module.graph.nodes)
    checks = {'functions', 'gradients', 'step'} if is_marked else {'gradients', 'step'}
    run = first_run('compare(model, module, x)', model, inputs, train, call)
    return compare_run(module, run, checks, is_marked)


def compare_run(module: torch.nn.Module, run: Trace, checks: Set[str], is_same: bool = True
                ) -> Comparison:
    """Compare a module with a run of its model: outputs, persistent values, and more.

    Args:
        module: The module.
        run: A run of the model.
        checks: Additional comparisons: ``functions`` one by one, ``gradients`` of functions and of
            parameters, and parameters after one ``step``.
        is_same: Whether the module calls the functions of this run.
    """
    result = Comparison()
    calls = run.needed() if is_same else []
    limit = max([_rounding(y) for each in run.calls for y in each.outputs], default=0.)
    if 'functions' in checks:
        _compare_functions(result, module, calls, run, 'gradients' in checks)
    with unchanged(module, run.train):
        expected = [as_array(y) for y in flattened(run.variables)]
        with torch.set_grad_enabled('gradients' in checks):
            outputs = run_module(module, calls, run.inputs)
        actual = [as_array(y) for y in flattened(outputs)]
        gradients = gradients_of(module, outputs) if 'gradients' in checks else {}
        noise = _Noise(module, calls, run.inputs, actual, gradients)
        _compare_all(result, result.outputs, [f'output {i}' for i in range(len(expected))],
                     actual, expected, noise.output, limit=limit)
        if 'gradients' in checks:
            _compare_gradients(result, module, run, noise, limit, 'step' in checks)
        buffers = dict(module.named_buffers())
        names = [name for name in run.state if name in buffers]
        _compare_all(result, result.step, [f'persistent value {name}' for name in names],
                     [buffers[name] for name in names], [run.state[name] for name in names],
                     lambda i: max(map(noise.output, range(len(actual))), default=0.), limit=limit)
    return result


def difference(actual: Any, expected: Any, least: float = 0.) -> float:
    """Return the largest difference between two arrays, relative to the largest element.

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
    if expected.dtype.itemsize < 4:
        actual, expected = actual.astype('f'), expected.astype('f')
    with np.errstate(invalid='ignore'):
        largest = max(_size(expected), least)
        error = _size(actual - expected)
    if not np.isfinite(largest + error):
        is_finite = np.isfinite(expected)
        if is_finite.all() or not np.array_equal(is_finite, np.isfinite(actual)) or (
                not np.array_equal(actual[~is_finite], expected[~is_finite], equal_nan=True)):
            return float('inf')
        return difference(actual[is_finite], expected[is_finite], least)
    return error / largest if largest else error


def _size(array: Array) -> float:
    """Return the largest absolute value of an array, without a copy of it."""
    return max(float(array.max()), -float(array.min()))


class _Noise:
    """The change in outputs and gradients if all values are rounded differently.

    It is computed only when a difference is large enough to need it.
    """

    def __init__(self, module: torch.nn.Module, calls: list[TracedCall], inputs: tuple[Any, ...],
                 outputs: list[Array], gradients: dict[str, Array]) -> None:
        self._module, self._calls, self._inputs = module, calls, inputs
        self.outputs, self.gradients = outputs, gradients

    def output(self, i: int) -> float:
        """Return the change in an output."""
        return difference(self._changed[0][i], self.outputs[i])

    @functools.cached_property
    def gradient(self) -> float:
        """The largest change in any gradient, since maxima and signs can change in any layer."""
        return max((difference(self._changed[1][name], gradient, self.least)
                    for name, gradient in self.gradients.items()), default=0.)

    @functools.cached_property
    def least(self) -> float:
        """A lower bound for differences of gradients: some are zero except for rounding."""
        return max((max(1e-4, 5 * _rounding(g)) * _size(g)
                    for g in self.gradients.values() if g.size), default=0.)

    @functools.cached_property
    def _changed(self) -> tuple[list[Array], dict[str, Array]]:
        generator = torch.Generator().manual_seed(0)

        def changed(value: Any) -> Any:
            if not torch.is_tensor(value) or value.dtype != torch.float32:
                return value
            return value * (1 + 3e-7 * torch.randn(value.shape, generator=generator))

        inputs = mapped(tensors(self._inputs), changed)
        with unchanged(self._module, self._module.training):
            if self._calls:
                outputs = ModuleRun(self._module, self._calls,
                                    lambda k, i, value: changed(value)).run(*inputs)
            else:
                outputs = self._module(*inputs)
            gradients = gradients_of(self._module, outputs) if self.gradients else {}
        return [as_array(y) for y in flattened(outputs)], gradients


def _compare_functions(result: Comparison, module: torch.nn.Module, calls: list[TracedCall],
                       run: Trace, gradients: bool) -> None:
    """Compare each function, and its gradient, computed from Chainer's inputs."""
    def computed(noise: float) -> list[tuple[int, str, Array, Array]]:
        with unchanged(module, run.train):
            return run_one_by_one(module, calls, run.inputs, gradients, noise)

    found = computed(0.)
    noise: list[float] = []

    def rounding(i: int) -> float:
        if not noise:
            noise.extend(difference(changed[2], found[j][2], least(j))
                         for j, changed in enumerate(computed(1.2e-7)))
        return noise[i]

    def least(i: int) -> float:
        """Return a lower bound for differences of outputs that are nearly zero."""
        sizes = [_size(x) for x in calls[found[i][0]].in_arrays if x.dtype.kind == 'f' and x.size]
        return 1e-5 * max(sizes) if sizes and np.isfinite(sizes).all() else 0.

    _compare_all(result, result.functions, [calls[k].label + what for k, what, _, _ in found],
                 [actual for *_, actual, _ in found], [expected for *_, expected in found],
                 rounding, least)


def _compare_gradients(result: Comparison, module: torch.nn.Module, run: Trace, noise: _Noise,
                       limit: float, step: bool) -> None:
    """Compare gradients, and parameters after one step of SGD."""
    variables = [y for y in flattened(run.variables)
                 if isinstance(y, chainer.Variable) and y.dtype.kind == 'f'
                 and y.creator_node is not None]
    parameters = state.parameters(run.model)
    saved = {name: p.grad_var for name, p in parameters.items()}
    for p in parameters.values():
        p.cleargrad()
    # Use PyTorch's kernels only if gradients of functions have been compared with NumPy's.
    with chainer.using_config('use_torch', 'auto' if result.functions else 'never'):
        if variables:
            total = sum(chainer.functions.sum(y * direction(y.shape).astype(y.dtype))
                        for y in variables)
            total.backward()
    expected = {name: np.zeros_like(p.array) if p.grad is None else p.grad
                for name, p in parameters.items()}
    for name, p in parameters.items():
        p.grad_var = saved[name]
    # Deep networks amplify rounding without limit, but functions have been compared one by one.
    largest = float('inf') if result.functions else .01
    actual = noise.gradients
    names = [name for name in reversed(list(expected)) if name in actual]
    missing = expected.keys() - actual.keys()
    if missing and result.first_difference is None:
        result.first_difference = f'parameter {min(missing)} is missing'
    _compare_all(result, result.gradients, [f'gradient of {name}' for name in names],
                 [actual[name] for name in names], [expected[name] for name in names],
                 lambda i: noise.gradient, lambda i: noise.least, largest, limit)
    if step:
        tensors = dict(module.named_parameters(remove_duplicate=False))
        _compare_all(
            result, result.step, names,
            [as_array(tensors[name]) - LEARNING_RATE * actual[name] for name in names],
            [parameters[name].array - LEARNING_RATE * expected[name] for name in names],
            lambda i: noise.gradient, lambda i: LEARNING_RATE * noise.least, largest, limit)


def _rounding(array: Any) -> float:
    """Return the difference that rounding explains; zero for integers."""
    return ROUNDING.get(as_array(array).dtype.name, 0.)


def _compare_all(result: Comparison, into: dict[str, float], names: list[str], actual: list[Any],
                 expected: list[Any], rounding: Callable[[int], float],
                 least: Callable[[int], float] = lambda i: 0., largest: float = .01,
                 limit: float = 0.) -> None:
    """Record differences, and the first one above ``limit`` and the rounding of its dtype."""
    if len(actual) != len(expected):
        result.first_difference = result.first_difference or (
            f'{len(actual)} outputs instead of {len(expected)}')
        return
    for i, name in enumerate(names):
        allowed = _rounding(expected[i])
        error = difference(actual[i], expected[i])
        if error > allowed:
            error = difference(actual[i], expected[i], least(i))
        into[name] = max(error, into.get(name, 0.))
        if error <= allowed or result.first_difference is not None:
            continue
        if allowed == 0 or error > max(limit, min(largest, AMPLIFIED * rounding(i))):
            result.first_difference = f'{name} by {error:.1e}, relative to its largest element'
