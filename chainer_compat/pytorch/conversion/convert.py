"""``to_torch``: run a model, build a module, and compare them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import chainer
import numpy as np
from torch import fx

from chainer_compat.pytorch.conversion import state
from chainer_compat.pytorch.conversion.batch_size import batch_size, other_sizes, varied
from chainer_compat.pytorch.conversion.comparison import compare_run, difference
from chainer_compat.pytorch.conversion.errors import ConversionError, showing_user_code
from chainer_compat.pytorch.conversion.first_run import first_run
from chainer_compat.pytorch.conversion.module import Builder
from chainer_compat.pytorch.conversion.patches import on_one_rank
from chainer_compat.pytorch.conversion.references import TracedCall, flattened, mapped
from chainer_compat.pytorch.conversion.tracing import Trace, copied, run_again, trace, trace_again

#: The limit in bytes of a recorded run that only checks whether another batch size works.
MEMORY = 2 ** 30


@showing_user_code
@on_one_rank()
def to_torch(model: chainer.Link, *inputs: Any, train: bool = False,
             dynamic_batch: bool | None = None, call: Callable[..., Any] | None = None
             ) -> fx.GraphModule:
    """Convert a Chainer model to a PyTorch module.

    The model runs with the example inputs, then with different values and a different batch size.
    The module's parameters have Chainer's names, with dots instead of slashes. The module is
    compared with Chainer on these inputs: functions, outputs, gradients and running statistics. The
    model is not changed.

    Args:
        model: A Chainer model on the CPU.
        inputs: Example inputs: NumPy arrays, variables, numbers, lists, tuples and dicts of them.
        train: Whether to convert the model for training, with dropout, and with batch statistics in
            batch normalization. Calling ``eval()`` on the module then selects inference.
        dynamic_batch: Whether the module accepts any batch size, which is the length of the first
            array. ``None`` means that it does if the model does. If the batch size is fixed, the
            module checks the shapes of its inputs.
        call: Function to run instead of ``model``, such as ``model.predict``.

    Returns:
        A ``torch.fx.GraphModule`` in the mode that ``train`` selects.

    Raises:
        ConversionError: If the model uses a function without an expression in PyTorch, or if its
            control flow or constants depend on the inputs. The message gives the function, the
            link and the line.
    """
    return converted('to_torch(model, x)', model, inputs, train, dynamic_batch, call, True)[0]


def converted(operation: str, model: chainer.Link, inputs: tuple[Any, ...], train: bool,
              dynamic_batch: bool | None, call: Callable[..., Any] | None, with_gradients: bool
              ) -> tuple[fx.GraphModule, list[Trace]]:
    """Return a module, and the runs of the model that it was compared with, in order.

    Args:
        operation: A typical call of the public function, for error messages.
        model: The model. This and the next four arguments are those of :func:`to_torch`.
        inputs: The example inputs.
        train: Whether to convert for training.
        dynamic_batch: Whether the module accepts any batch size.
        call: Function to run instead of ``model``.
        with_gradients: Whether gradients must match Chainer's. If false, expressions are simpler,
            gradients can differ where several maxima are equal, and they are not compared.
    """
    first = first_run(operation, model, inputs, train, call)
    _check_calls_are_independent(first)
    size = batch_size(inputs)
    failure: Exception | None = None
    if size is not None and dynamic_batch is not False:
        try:
            if size > 1:
                return _compared(first, with_gradients, size)
            # With a batch size of 1, broadcasting would hide how sizes depend on it.
            second = _other_run(first, 1, 2, trace_again)
            return _compared(second, with_gradients, 2)
        except Exception as error:  # raised by the user's model, which may need this batch size
            failure = error
    if dynamic_batch:
        raise ConversionError(
            f'The model cannot be converted for all batch sizes: {failure} '
            'Use dynamic_batch=False to convert it for the batch size of the example.') from failure
    return _compared(first, with_gradients, None)


def _compared(first: Trace, with_gradients: bool, size: int | None
              ) -> tuple[fx.GraphModule, list[Trace]]:
    """Return a module that has been compared with the model, and the runs of the model."""
    runs = [first, _other_run(first, size, None if size is None else size + 1, trace_again)]
    batch = None if size is None else (size, size + 1)
    builder = Builder((first, runs[1]), batch, with_gradients)
    module = builder.module()
    _compare(module, first, {'functions', 'gradients'} if with_gradients else {'functions'})
    _compare(module, runs[1], {'functions'})
    if size is None:
        runs += [_other_run(first, None, None, run_again(first), seed) for seed in (1, 2)]
        for run in runs[2:]:
            _compare(module, run, set())
    else:
        runs += _compared_sizes(module, first, size)
    if first.train and not all(
            _infers_equally(module, first, inputs) for inputs in (
                first.inputs, *([] if size is None else [next(varied(first.inputs, size, 1))]))):
        builder.forbid_inference(module)
    return module, runs


def _compared_sizes(module: fx.GraphModule, first: Trace, size: int) -> list[Trace]:
    """Compare the results for more batch sizes, and return the runs of the model.

    Two sizes cannot show how a value depends on the batch size: ``(n + 1) // 2`` is 2 for 3 and
    for 4. The model may reject batch sizes that are smaller than the example's.
    """
    runs = []
    run = run_again(first)
    for other in other_sizes(size):
        if run is trace_again and first.nbytes * other > size * MEMORY:
            continue
        try:
            found = _other_run(first, size, other, run, other)
        except ConversionError:
            if other > size:
                raise
            continue
        try:
            _compare(module, found, set())
        except ConversionError as error:
            if other == 1 and first.train and error.__cause__ is not None:
                continue  # PyTorch does not support batch normalization of one element
            if other > 1:
                raise ConversionError(f'With a batch size of {other}: {error}') from None
            raise ConversionError(
                'With a batch size of 1, the model computes something different: for example, '
                'F.squeeze then also removes the batch axis.') from None
        runs.append(found)
    return runs


def _compare(module: fx.GraphModule, run: Trace, checks: set[str]) -> None:
    try:
        found = compare_run(module, run, checks)
    except Exception as error:
        cause = str(error).strip().split('\n')[0]
        raise ConversionError('PyTorch cannot run the converted module: '
                              f'{type(error).__name__}: {cause}') from error
    if found.first_difference:
        raise ConversionError(f'The module and the model compute different results: {found}.')


def _other_run(first: Trace, size: int | None, other: int | None,
               run: Callable[[Trace, tuple[Any, ...], int], Trace], seed: int = 0) -> Trace:
    """Run the model with different values, and with another batch size if it has one."""
    failure: Exception | None = None
    for inputs in varied(first.inputs, size, other, seed):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')  # Chainer warns about small batches
                return run(first, inputs, seed + 1)
        except ConversionError:
            raise
        except Exception as error:  # the model may reject these values
            failure = error
    raise ConversionError(
        'The model does not run with different input values, so the conversion cannot determine '
        f'which values depend on the inputs: {type(failure).__name__}: {failure}. Use call= to '
        'convert a function that accepts any values.') from failure


def _check_calls_are_independent(first: Trace) -> None:
    """Raise an error if a call depends on earlier calls, as with an LSTM that is not reset.

    Persistent values may change, because they are part of the module.
    """
    model, outputs = first.model, []
    with state.unchanged(model), chainer.using_config('train', first.train):
        for _ in range(2):
            np.random.seed(0)
            random.seed(0)
            before = [dict(link.__dict__) for link in model.links()]
            persistent = [(value, value.copy()) for value in state.persistent_values(model).values()
                          if value.flags.writeable]
            outputs.append(flattened((first.call or model)(*mapped(first.inputs, copied))))
            for value, copy in persistent:
                value[...] = copy
        changed = [f'{path.rstrip("/")}/{name}' for (path, link), old in zip(
            model.namedlinks(), before, strict=True) for name, value in link.__dict__.items()
            if old.get(name) is not value]
    if any(isinstance(both[0], chainer.Variable | np.ndarray) and difference(*both) > 1e-6
           for both in zip(*outputs, strict=True)):
        raise ConversionError(
            f'The model keeps values between calls, such as {", ".join(changed[:4])}, so each call '
            'depends on earlier ones. Reset them in forward, or use call= to convert a function '
            'that takes and returns them.')


def _infers_equally(module: fx.GraphModule, first: Trace, inputs: tuple[Any, ...]) -> bool | None:
    """Return whether inference matches the model; ``None`` if the model fails."""
    try:
        run = trace(first.model, inputs, False, first.call)
    except Exception:  # raised by the user's model
        return None
    calls = run.needed()
    if first.train and any(each.train for each in calls):
        return False  # the model chooses this mode itself
    is_same = list(map(_kind, calls)) == list(map(_kind, first.needed()))
    try:
        return compare_run(module, run, set(), is_same).first_difference is None
    except Exception:  # raised by the module
        return False


def _kind(call: TracedCall) -> Any:
    """Return the class of a function, and its dropout ratio if it has one."""
    return call.name, getattr(call.function, 'ratio', None)
