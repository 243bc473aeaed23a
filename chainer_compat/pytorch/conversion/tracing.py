"""Records a run of a model: its functions in order, and the origins of their inputs."""

from __future__ import annotations

import linecache
import pickle
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import chainer
import numpy as np
from chainer import FunctionNode, Parameter, Variable
from chainer.function import FunctionAdapter
from chainer.functions.util.forget import Forget

from chainer_compat.pytorch.conversion.errors import ConversionError, is_library
from chainer_compat.pytorch.conversion.patches import patched
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
from chainer_compat.pytorch.conversion.state import unchanged
from chainer_compat.pytorch.conversion.tracked_array import (
    Array,
    Lost,
    TrackedArray,
    elements,
    plain,
    tracked,
)
from chainer_compat.pytorch.expressions import NUMPY
from chainer_compat.pytorch.expressions.noise import DRAWN, GIVEN


class Trace:
    """A recorded run."""

    def __init__(self, model: chainer.Link, inputs: tuple[Any, ...], train: bool,
                 call: Callable[..., Any] | None) -> None:
        self.model, self.inputs, self.train, self.call = model, inputs, train, call
        self.calls: list[TracedCall] = []
        self.outputs: Any = None
        self.variables: Any = None
        self.state: dict[str, Array] = {}
        self._links: list[str] = []
        self._paths = {id(link): path for path, link in model.namedlinks()}
        self._parts = {id(part) for part in [*model.links(), *model.params()]}
        self._nodes: dict[Any, Reference] = {}
        self._arrays: dict[Any, Reference] = {}
        self._owners: list[Any] = []  # keeps the memory that identifies arrays
        self._random = _random_state()
        self.is_inside = False

    def place(self) -> str:
        """Return the link and the line of user code that are being executed."""
        frame = _frame()
        link = self._links[-1] if self._links else ''
        if link:
            link = f'link {link}, ' if link != '/' else f'{type(self.model).__name__}, '
        return f'{link}{frame.f_code.co_filename}:{frame.f_lineno}'

    def source(self) -> str:
        """Return the text of this line after a colon, or nothing if it cannot be read."""
        frame = _frame()
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        return line and f': {line}'

    def check_random(self) -> None:
        """Raise an error if the model drew random numbers in a way that the trace does not show."""
        if _random_state() != self._random:
            raise ConversionError(
                'The model cannot be converted: it draws random numbers in a way that is not '
                f'supported ({self.place()}). Use Chainer functions, such as F.dropout, or '
                'np.random.normal, uniform or gumbel.')

    def check_links(self) -> None:
        """Raise an error if the run created links or parameters, which are untrained."""
        for path, part in [*self.model.namedlinks(), *self.model.namedparams()]:
            if isinstance(part, chainer.Link | Parameter) and id(part) not in self._parts:
                raise ConversionError(
                    f'The model creates {path} when it is called. Create it in __init__, or call '
                    'the model once before the conversion.')

    def draw(self, name: str, size: Any) -> Array:
        """Draw random numbers for the model with NumPy."""
        self.check_random()
        result = np.asarray(getattr(np.random.mtrand, name)(size))
        self._random = _random_state()
        function = NumpyFunction(f'random.{name}', (), {})
        function.drawn = result
        call = self.record(function, [], [], [result])
        return tracked(result, Output(call, 0))

    def add_array(self, array: Array, reference: Reference) -> None:
        """Record the origin of an array."""
        self._owners.append(array)
        self._arrays.setdefault(identity(array), reference)

    def reference(self, value: Any) -> Reference:
        """Return the origin of a function's input.

        Raises:
            ConversionError: If it was computed in a way that the trace does not show.
        """
        if isinstance(value, Variable):
            node = value.node
            if node in self._nodes:
                found = self._nodes[node]
                cut = isinstance(found, Output) and node.creator_node is None
                return Detached(found) if cut else found
            if isinstance(value, Parameter):
                return Leaf(value._data[0])
            if value.creator_node is not None:
                raise ConversionError('its input was computed before the conversion. Reset the '
                                      'state of recurrent links first')
            value = value._data[0]
        if isinstance(value, TrackedArray):
            if isinstance(value.reference, Lost):
                raise ConversionError(
                    f'its input was computed from inputs of the model by {value.reference.name}, '
                    'which has no expression in PyTorch. Use Chainer functions instead')
            return value.reference
        known = self._arrays.get(identity(value))
        if known is None:
            return Leaf(value)
        return Detached(known) if isinstance(known, Output) else known

    def record(self, function: Any, inputs: list[Reference], arrays: list[Array],
               outputs: Any) -> TracedCall:
        """Add a function that has run."""
        call = TracedCall(function, inputs, self.place())
        call.in_arrays = arrays
        for i, y in enumerate(outputs):
            array = y._data[0] if isinstance(y, Variable) else y
            call.outputs.append(array)
            self.add_array(array, Output(call, i))
            if isinstance(y, Variable):
                self._nodes[y.node] = Output(call, i)
                self._owners.append(y.node)
        self.calls.append(call)
        return call

    def apply(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``FunctionNode.apply`` that records the function."""

        def apply(node: FunctionNode, inputs: Any) -> Any:
            if self.is_inside:
                return original(node, inputs)
            if isinstance(node, Forget):  # its function runs here, so that it is recorded
                outputs = node.func(*inputs)
                return outputs if isinstance(outputs, tuple) else (outputs,)
            function = node.function if isinstance(node, FunctionAdapter) else node
            self.check_random()
            try:
                references = [self.reference(x) for x in inputs]
            except ConversionError as error:
                raise ConversionError(
                    f'{type(function).__name__} cannot be converted: {error} ({self.place()}).'
                ) from None
            for x in inputs:
                if isinstance(x, Variable):
                    x._data[0] = plain(x._data[0])
            inputs = [plain(x) for x in inputs]
            arrays = [x._data[0] if isinstance(x, Variable) else x for x in inputs]
            is_given = getattr(function, GIVEN.get(type(function).__name__, ''), None) is not None
            self.is_inside = True
            try:
                outputs = original(node, inputs)
            finally:
                self.is_inside = False
            self._random = _random_state()
            call = self.record(function, references, arrays, outputs)
            call.node = node if node is function else None  # old functions run backward only once
            call.is_given = is_given
            return outputs

        return apply

    def numpy_function(self, name: str, args: Any, kwargs: Any, result: Any) -> Any:
        """Record a NumPy function, and return its result as a tracked array."""
        if self.is_inside:
            return result
        if name == 'copy':
            return tracked(result, args[0].reference)
        if not isinstance(result, np.ndarray | np.generic | tuple | list | np.dtype):
            if name in ('shape', 'ndim', 'size'):
                return result
            raise ConversionError(
                f'The model cannot be converted: numpy.{name} uses an array that depends on the '
                'inputs, but returns no array or modifies one, so the module would always use the '
                f'result from the example ({self.place()}{self.source()}). Use '
                "Chainer's functions instead.")
        if name not in NUMPY or _is_lost((args, kwargs)) or not isinstance(
                result, np.ndarray | np.generic):
            return _marked(result, Lost(f'numpy.{name} ({self.place()})'))
        result = np.asarray(result)
        arrays = [plain(x) for x in elements((args, kwargs)) if isinstance(x, TrackedArray)]
        call = self.record(NumpyFunction(name, args, kwargs), _references((args, kwargs)), arrays,
                           [result])
        return tracked(result, Output(call, 0))

    def array_of(self, variable: Variable, array: Array) -> Array:
        """Return ``variable.array`` for the model, as a tracked array."""
        frame = sys._getframe(2)
        caller = frame.f_globals.get('__name__', '')
        is_internal = is_library(caller) and frame.f_code.co_name != 'as_array' and (
            not caller.startswith(('chainer.functions.', 'chainer.distributions.')))
        if self.is_inside or array is None or is_internal:
            return array
        reference = self.reference(variable)
        is_final = isinstance(reference, Input | Detached)
        return tracked(array, reference if is_final else Detached(reference))

    @property
    def nbytes(self) -> int:
        """The size of all function outputs in bytes."""
        return sum(y.nbytes for call in self.calls for y in call.outputs)

    def needed(self) -> list[TracedCall]:
        """Return the functions that the outputs depend on, in order."""
        found: set[int] = set()
        waiting = [each for each in flattened(self.outputs)]
        while waiting:
            reference = waiting.pop()
            while isinstance(reference, Detached):
                reference = reference.value
            if isinstance(reference, Output) and id(reference.call) not in found:
                found.add(id(reference.call))
                waiting += reference.call.inputs + self._attributes(reference.call)
        return [call for call in self.calls if id(call) in found]

    def _attributes(self, call: TracedCall) -> list[Reference]:
        """Return references to arrays that are attributes of a function."""
        arrays = [each for each in elements(dict(vars(call.function)))
                  if isinstance(each, np.ndarray)]
        references = [each.reference if isinstance(each, TrackedArray)
                      else self._arrays.get(identity(each)) for each in arrays]
        return [each for each in references if isinstance(each, Reference)
                and not (isinstance(each, Output) and each.call is call)]

    def hook(self) -> chainer.LinkHook:
        """Return a hook that records which link is running."""
        links, paths = self._links, self._paths

        class Hook(chainer.LinkHook):
            name = 'chainer_compat.pytorch.conversion'

            def forward_preprocess(self, args: Any) -> None:
                links.append(paths.get(id(args.link), type(args.link).__name__))

            def forward_postprocess(self, args: Any) -> None:
                links.pop()

        return Hook()


def trace(model: chainer.Link, inputs: tuple[Any, ...], train: bool,
          call: Callable[..., Any] | None = None, seed: int | None = None) -> Trace:
    """Run a model with example inputs and return the record. The model is not changed.

    Args:
        model: The model.
        inputs: Its arguments: arrays, variables, numbers, and lists, tuples or dicts of them.
        train: Whether to run the model in training mode.
        call: Function to run instead of ``model``, such as ``model.predict``.
        seed: The seed of the random numbers, so that two runs draw different numbers.
    """
    record = Trace(model, inputs, train, call)
    arguments = tuple(_input(x, (i,), record) for i, x in enumerate(inputs))
    with unchanged(model) as state, patched(record), record.hook(), chainer.using_config(
            'train', train), chainer.using_config('use_torch', 'never'), chainer.using_config(
            'enable_backprop', True):
        if seed is not None:
            np.random.seed(seed)
            random.seed(seed)
        record._random = _random_state()
        record.variables = (call or model)(*arguments)
        record.check_random()
        record.check_links()
        record.outputs = mapped(record.variables, lambda y: _output(y, record))
        record.state = state()
    return record


def trace_again(first: Trace, inputs: tuple[Any, ...], seed: int) -> Trace:
    """Run the model of a record with different inputs, and return the new record."""
    return trace(first.model, inputs, first.train, first.call, seed)


def run_again(first: Trace) -> Callable[[Trace, tuple[Any, ...], int], Trace]:
    """Return ``trace_again`` if the model is random, or a function that only records outputs."""
    return trace_again if any(call.name in DRAWN for call in first.calls) else _results


def _results(first: Trace, inputs: tuple[Any, ...], seed: int) -> Trace:
    """Run the model of a record with different inputs, and record only the new outputs."""
    record = Trace(first.model, inputs, first.train, first.call)
    record.calls, record.outputs = first.calls, first.outputs
    with unchanged(first.model) as state, chainer.using_config(
            'train', first.train), chainer.no_backprop_mode():
        record.variables = (first.call or first.model)(*mapped(inputs, copied))
        record.state = state()
    return record


def copied(value: Any) -> Any:
    """Return a copy of an array, or any other value itself."""
    return value.copy() if isinstance(value, np.ndarray) else value


def _input(value: Any, path: tuple[Any, ...], record: Trace) -> Any:
    """Return an argument for the model, with tracked arrays."""
    if isinstance(value, dict):
        return {key: _input(each, (*path, key), record) for key, each in value.items()}
    if isinstance(value, tuple | list):
        elements = [_input(each, (*path, i), record) for i, each in enumerate(value)]
        return tuple(elements) if isinstance(value, tuple) else elements
    if isinstance(value, Variable):
        return Variable(_input(value.array, path, record), requires_grad=value.requires_grad)
    if isinstance(value, np.ndarray):
        array = np.array(value)
        record.add_array(array, Input(path))
        return tracked(array, Input(path))
    return value


def _output(value: Any, record: Trace) -> Reference:
    is_array = isinstance(value, Variable | np.ndarray | np.generic)
    try:
        return record.reference(value) if is_array else value
    except ConversionError as error:
        raise ConversionError(f'An output of the model cannot be converted: {error}.') from None


def _frame() -> types.FrameType:
    """Return the innermost frame outside libraries."""
    frame = sys._getframe(2)
    while frame.f_back is not None and is_library(frame.f_globals.get('__name__', '')):
        frame = frame.f_back
    return frame


def _random_state() -> Any:
    numbers = np.random.get_state(legacy=False)
    return random.getstate(), pickle.dumps(numbers)


def _references(arguments: Any) -> list[Reference]:
    return [each.reference for each in elements(arguments) if isinstance(each, TrackedArray)]


def _is_lost(arguments: Any) -> bool:
    return any(isinstance(each, Lost) for each in _references(arguments))


def _marked(result: Any, lost: Lost) -> Any:
    """Return results that raise an error when they are used."""
    if isinstance(result, tuple | list):
        return type(result)(_marked(each, lost) for each in result)
    return tracked(result, lost) if isinstance(result, np.ndarray | np.generic) else result
