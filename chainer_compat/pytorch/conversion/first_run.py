"""The first run of a model, with errors for wrong arguments and failing calls."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import numpy as np
import torch

from chainer_compat.pytorch.conversion import state
from chainer_compat.pytorch.conversion.errors import ConversionError, is_library, name_of_kind
from chainer_compat.pytorch.conversion.tracing import Trace, trace


def first_run(operation: str, model: chainer.Link, inputs: tuple[Any, ...], train: bool,
              call: Callable[..., Any] | None) -> Trace:
    """Initialize the model, and return the record of a run with the example inputs.

    Args:
        operation: A typical call of the public function, such as ``'to_torch(model, x)'``.
        model: The model.
        inputs: The example inputs.
        train: Whether to run the model in training mode.
        call: Function to run instead of ``model``.

    Raises:
        ConversionError: If an argument has the wrong type, or the model cannot be called.
    """
    check_model(operation, model)
    if call is not None and not callable(call):
        example = f'model.{call}' if isinstance(call, str) and hasattr(model, call) else (
            'model.predict')
        raise ConversionError(f'{_name(operation)}: call must be a function, such as '
                              f'call={example}, not {call!r}.')
    for i, value in enumerate(inputs):
        _check_input(value, f'input {i}')
    if any(not isinstance(p.device, chainer.backend.CpuDevice) for p in model.params()):
        raise ConversionError("The model is not on the CPU. Call model.to_device('@numpy') first.")
    with as_conversion_error(operation, inputs, model):
        state.initialize(model, lambda: (call or model)(*inputs))
        return trace(model, inputs, train, call)


def check_model(operation: str, model: object) -> None:
    """Raise an error if the model is not a chainer.Link."""
    if isinstance(model, chainer.Link):
        return
    kind, target = name_of_kind(model), ''
    if isinstance(model, type):
        kind, target = f'the class {model.__name__}', f' Pass an instance: {model.__name__}(...).'
    elif hasattr(model, 'target'):
        target = ' Pass its model, optimizer.target.'
    raise ConversionError(
        f'{_name(operation)}: model must be a chainer.Link, not {kind}.{target} '
        f'The order of the arguments is {operation}.')


def _name(operation: str) -> str:
    return operation.partition('(')[0]


def _check_input(value: object, name: str) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            _check_input(each, f'{name}[{key!r}]')
    elif isinstance(value, list | tuple):
        for i, each in enumerate(value):
            _check_input(each, f'{name}[{i}]')
    elif isinstance(value, torch.Tensor):
        raise ConversionError(f'{name} is a torch.Tensor, but the Chainer model needs NumPy '
                              'arrays. Pass x.numpy().')


@contextlib.contextmanager
def as_conversion_error(operation: str, inputs: tuple[Any, ...],
                        model: chainer.Link | None = None) -> Iterator[None]:
    """Raise a ConversionError if the user's model raises an error."""
    try:
        yield
    except ConversionError:
        raise
    except Exception as error:
        lines = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)
                 if not is_library(frame.f_globals.get('__name__', ''))]
        place = f' ({lines[-1][0].f_code.co_filename}:{lines[-1][1]})' if lines else ''
        if not inputs:
            hint = f' Pass example inputs: {operation}.'
        elif isinstance(model, chainer.links.Classifier) and len(inputs) == 1:
            hint = (' L.Classifier also takes the labels. To convert the model that it wraps, pass '
                    f'model.predictor: {operation.replace("model", "model.predictor")}.')
        elif any(map(_is_numbers, inputs)):
            hint = ' Pass arrays, such as np.array(x, np.float32), instead of lists of numbers.'
        else:
            hint = ''
        raise ConversionError(
            f'The model cannot be called with {", ".join(map(_described, inputs)) or "no inputs"}: '
            f'{type(error).__name__}: {error}{place}.{hint}') from (error if lines else None)


def _is_numbers(value: object) -> bool:
    """Return whether a value is a list of numbers, or a nested list of numbers."""
    while isinstance(value, list | tuple) and value:
        value = value[0]
        if isinstance(value, bool | int | float):
            return True
    return False


def _described(value: object) -> str:
    if isinstance(value, np.ndarray | chainer.Variable):
        return f'{value.dtype} {value.shape}'
    return name_of_kind(value)
