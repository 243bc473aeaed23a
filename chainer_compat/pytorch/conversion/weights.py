"""``load_weights``: copy the weights of a PyTorch module into a Chainer model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import chainer
import numpy as np
import torch

from chainer_compat.pytorch.conversion import state
from chainer_compat.pytorch.conversion.comparison import compare
from chainer_compat.pytorch.conversion.errors import ConversionError, name_of_kind
from chainer_compat.pytorch.conversion.first_run import as_conversion_error, check_model
from chainer_compat.pytorch.conversion.module_runs import tensors
from chainer_compat.pytorch.conversion.patches import on_one_rank
from chainer_compat.pytorch.conversion.references import Leaf, TracedCall, identity
from chainer_compat.pytorch.conversion.tracing import trace
from chainer_compat.pytorch.conversion.tracked_array import Array

#: PyTorch's names of tensors, in the order of Chainer's arguments.
TENSORS = 'weight', 'bias', 'running_mean', 'running_var'


@on_one_rank()
def load_weights(model: chainer.Link, source: torch.nn.Module | Mapping[str, Any], *inputs: Any,
                 call: Callable[..., Any] | None = None) -> None:
    """Copy the weights of a PyTorch module into a Chainer model.

    A converted module has the same names as the model. For other modules with the same layers,
    such as torchvision's ResNet-50, pass example inputs: the model and the module are run, and
    layers with weights are matched in the order in which they are called. A bias that the module
    does not have becomes zero. The ``eps`` of normalization layers is also copied. If the outputs
    still differ, there is a warning. If anything does not match, nothing is copied.

    Args:
        model: A Chainer model on the CPU. Its parameters must be initialized, unless inputs are
            given.
        source: A module, or the ``state_dict`` of a converted module.
        inputs: Example inputs, if the names differ.
        call: Function to run instead of ``model``.

    Raises:
        ValueError: If names, layers or shapes differ, or if parameters are not initialized.
    """
    check_model('load_weights(model, module)', model)
    if not isinstance(source, torch.nn.Module | Mapping):
        raise ConversionError('load_weights: pass a torch.nn.Module or its state_dict(), not '
                              f'{name_of_kind(source)}.')
    if inputs:
        with as_conversion_error('load_weights(model, module, x)', inputs):
            state.initialize(model, lambda: (call or model)(*inputs))
    tensors = source.state_dict() if isinstance(source, torch.nn.Module) else source
    waiting = [name for name in state.uninitialized(model) if name in tensors or not inputs]
    if waiting:
        raise ValueError(f'{waiting[0]} is not initialized: its link waits for its first input. '
                         'Pass example inputs with which the model calls this link, or give the '
                         'link its input size.')
    arrays = {**{name: p.array for name, p in state.parameters(model).items()},
              **{name: value for name, value in state.persistent_values(model).items()
                 if value.ndim}}
    missing = [name for name in arrays if name not in tensors]
    if not missing:
        numbers = _numbers(model, tensors)
        _copy({name: (array, tensors[name], name) for name, array in arrays.items()})
        for link, name, number in numbers:
            link.__dict__[name] = number
        return
    if not inputs or not isinstance(source, torch.nn.Module):
        raise ValueError(f'The state has no {missing[0]!r} ({len(missing)} of {len(arrays)} names '
                         'are missing). For a module with different names, pass the module and '
                         'example inputs.')
    calls = _calls_with_weights(model, inputs, call, arrays)
    modules = _modules_with_weights(source, inputs)
    pairs = _matched(calls, modules)
    _copy(pairs)
    _copy_eps(model, calls, modules)
    found = compare(model, _Inference(source), *inputs, train=False, call=call)
    outputs = max(found.outputs.values(), default=0.)
    if outputs > 1e-3:
        warnings.warn('All weights were copied, but outputs differ by '
                      f'{outputs:.1e}, relative to the largest element: the models differ in '
                      'something without weights, such as pooling or strides. To find it, print '
                      'chainer_compat.compare(model, module, x).', stacklevel=3)


class _Inference(torch.nn.Module):
    """Runs a module without registering it, so that comparisons find no parameters."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._function = [module]

    def forward(self, *inputs: Any) -> Any:
        module = self._function[0]
        mode = module.training
        module.eval()
        try:
            with torch.no_grad():
                return module(*inputs)
        finally:
            module.train(mode)


def _calls_with_weights(model: chainer.Link, inputs: tuple[Any, ...],
                        call: Callable[..., Any] | None, arrays: Mapping[str, Array]
                        ) -> list[tuple[TracedCall, dict[str, Array]]]:
    """Return the functions that have weights as inputs, each with its weights by name.

    Other arrays are constants, such as the factor of batch normalization without ``gamma``.
    """
    names = {identity(array): name for name, array in arrays.items()}
    found = []
    seen: set[str] = set()
    for each in trace(model, inputs, False, call).calls:
        used = {names[identity(x.array)]: x.array for x in each.inputs
                if isinstance(x, Leaf) and identity(x.array) in names}
        if used and not seen.issuperset(used):
            found.append((each, used))
            seen.update(used)
    return found


def _modules_with_weights(module: torch.nn.Module, inputs: tuple[Any, ...]
                          ) -> list[tuple[str, torch.nn.Module]]:
    """Return the submodules that have weights, in the order of their calls."""
    found: dict[str, torch.nn.Module] = {}
    hooks = [part.register_forward_hook(
        lambda part, _, __, name=name: found.setdefault(name, part) and None)
        for name, part in module.named_modules() if part._parameters or part._buffers]
    try:
        _Inference(module)(*tensors(inputs))
    finally:
        for hook in hooks:
            hook.remove()
    return list(found.items())


def _matched(calls: list[tuple[TracedCall, dict[str, Array]]],
             modules: list[tuple[str, torch.nn.Module]]) -> dict[str, tuple[Array, Any, str]]:
    """Return the tensor for each array of the model."""
    if len(calls) != len(modules):
        raise ValueError(f'The model calls {len(calls)} layers with weights, but the module '
                         f'calls {len(modules)}. Both must have the same layers.')
    pairs = {}
    for (each, arrays), (part_name, part) in zip(calls, modules, strict=True):
        known = {**part._parameters, **part._buffers}
        tensors = [(f'{part_name}.{name}', known[name]) for name in TENSORS
                   if known.get(name) is not None]
        others = sorted(known.keys() - {*TENSORS, 'num_batches_tracked'})
        if len(tensors) == len(arrays) - 1 and known.get('bias') is None and (
                known.get('weight') is not None):
            zeros = torch.zeros(tensors[0][1].shape[0])
            tensors.insert(1, (f'{part_name}.bias, which is missing,', zeros))
        if len(tensors) != len(arrays) or others:
            raise ValueError(
                f'{each.label} has the arrays {", ".join(arrays)}, but {part_name} has '
                f'{", ".join([*(name for name, _ in tensors), *others])}. Both models must have '
                'the same layers.')
        for (name, array), (tensor_name, tensor) in zip(arrays.items(), tensors, strict=True):
            pairs[name] = array, tensor, tensor_name
    return pairs


def _copy(pairs: Mapping[str, tuple[Array, Any, str]]) -> None:
    for name, (array, tensor, tensor_name) in pairs.items():
        if tuple(tensor.shape) != array.shape:
            raise ValueError(
                f'{name} has shape {array.shape}, but {tensor_name} has shape '
                f'{tuple(tensor.shape)} in the weights. Create the model with the same sizes as '
                'the one that was converted.')
    found = [(array, _as_numpy(tensor)) for array, tensor, _ in pairs.values()]
    for (name, (array, _, tensor_name)), (_, values) in zip(pairs.items(), found, strict=True):
        _check_kind(name, array, tensor_name, values)
    for array, values in found:
        array[...] = values


def _check_kind(name: str, array: Any, tensor_name: str, values: Array) -> None:
    """Raise an error if a cast would lose the fractional part of values."""
    if not np.can_cast(values.dtype, np.asarray(array).dtype, 'same_kind'):
        raise ValueError(f'{name} has dtype {np.asarray(array).dtype}, but {tensor_name} has '
                         f'dtype {values.dtype}. Convert one of them first, because a cast would '
                         'change the values.')


def _as_numpy(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().cpu()
    is_short = tensor.is_floating_point() and tensor.element_size() < 4
    return (tensor.float() if is_short else tensor).numpy()  # NumPy has no bfloat16


def _numbers(model: chainer.Link, tensors: Mapping[str, Any]
             ) -> list[tuple[chainer.Link, str, Any]]:
    """Return persistent numbers, such as ``N`` of batch normalization: link, name and number."""
    numbers = []
    for path, link in model.namedlinks():
        for name in link._persistent:
            value = link.__dict__[name]
            found = tensors.get(state.torch_name(f'{path}/{name}'))
            if found is not None and not isinstance(value, np.ndarray) and isinstance(
                    value, int | float | np.generic):
                if found.numel() != 1:
                    raise ValueError(f'{path}/{name} is a number, but the tensor has shape '
                                     f'{tuple(found.shape)}. Pass weights of the same model.')
                _check_kind(f'{path}/{name}', value, state.torch_name(f'{path}/{name}'),
                            _as_numpy(found))
                numbers.append((link, name, type(value)(found.item())))
    return numbers


def _copy_eps(model: chainer.Link, calls: list[tuple[TracedCall, dict[str, Array]]],
              modules: list[tuple[str, torch.nn.Module]]) -> None:
    links = {state.torch_name(path): link for path, link in model.namedlinks()}
    for (_, arrays), (_, part) in zip(calls, modules, strict=True):
        link = links.get(next(iter(arrays)).rpartition('.')[0])
        if link is not None and hasattr(part, 'eps') and hasattr(link, 'eps'):
            link.eps = part.eps


