"""Hooks of an optimizer, and the check of its gradients, with few kernel launches on a GPU.

Only Chainer's own hooks are called for many parameters together.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np

from chainer_compat.updates import device_gradients, elementwise, gradient_memory
from chainer_compat.updates.update_groups import is_number_or_none, is_plain

#: Classes of hooks that change each element of a gradient separately, and their ``__call__``.
_hooks: dict[Any, Any] = {}


def accept_hook(hook: Any) -> None:
    """Register a class of hooks to be called for many parameters together. Call it on import."""
    _hooks[hook] = hook.__call__


#: ``__call__`` of hooks that take the loss scale of parameters into account.
_aware: set[Any] = set()


def accept_scaled(hook: Any) -> None:
    """Register a class of hooks that can change gradients that still contain the loss scale.

    This way, float16 gradients are not rounded without the scale.
    """
    _aware.add(hook.__call__)


def prepare(hook: Any, params: Iterable[Any]) -> None:
    """Make gradients safe to change in place, and unscale them if the hook ignores the scale."""
    params = [*params]
    gradient_memory.own(params)
    scales = {None if (scale := param._loss_scale) is None else float(scale) for param in params}
    if scales != {None} and (len(scales) > 1 or type(hook).__call__ not in _aware):
        gradient_memory.unscale(params)


def scaled(number: Any, param: Any) -> Any:
    """Return a bound for scaled gradients, limited to the range of their dtype."""
    scale = param._loss_scale
    if number is None or scale is None or not isinstance(number, int | float):
        return number if number is None or scale is None else number * scale
    limit = float(np.finfo(gradient_memory.gradient_of(param).dtype).max)
    return min(max(number * scale, -limit), limit)


def scaled_threshold(hook: Any, optimizer: Any) -> Any:
    """Return the threshold of a hook for the norm of all gradients, which have the same scale."""
    scales = [param._loss_scale for param in optimizer.target.params(False)]
    return hook.threshold * (scales[0] if scales and scales[0] is not None else 1)


def call_hook(hook: Any, params: Iterable[Any]) -> None:
    """Call a hook for each parameter; on a GPU, with one launch if it launches one for each."""
    kind, rest = type(hook), [*params]
    prepare(hook, [param for param in rest if param.is_initialized])
    if kind in _hooks and kind.__call__ is _hooks[kind] and '__call__' not in vars(hook):
        groups: dict[Hashable, list[Any]] = {}
        for param in rest:
            if is_plain(param) and is_number_or_none(param._loss_scale):
                grad = param._grad
                key = grad.dtype.char, grad.data.device_id, param._loss_scale
                groups.setdefault(key, []).append(param)
        memory = [elementwise.memory_of(x) for group in groups.values() for param in group
                  for x in (param._data[0], param._grad)]
        if len({*memory}) == len(memory):
            done = {id(param) for group in groups.values() if _called_together(hook, group)
                    for param in group}
            rest = [param for param in rest if id(param) not in done]
    for param in rest:
        hook(param.update_rule, param)


def not_finite(target: Any) -> list[tuple[str, Any]]:
    """Return the parameters of a link whose gradients are not finite, with their paths."""
    named = [*target.namedparams()]
    are_finite = device_gradients.are_finite([param.grad for _, param in named])
    if are_finite is None:
        are_finite = [_is_finite(param) for _, param in named]
    return [pair for pair, is_finite in zip(named, are_finite, strict=True) if not is_finite]


def _is_finite(param: Any) -> bool:
    import chainer

    xp = param.device.xp
    with chainer.using_device(param.device):  # its stream computes the gradient
        return bool(xp.all(xp.isfinite(param.grad)))


def _called_together(hook: Any, params: list[Any]) -> bool:
    from chainer.backends.cuda import cupy

    first = params[0]
    with cupy.cuda.Device(first._grad.data.device_id):
        with elementwise.recorded() as calls:
            hook(first.update_rule, first)
        return len(calls) == 1 and elementwise.launch(
            calls[0], [first._data[0], first._grad],
            [[param._data[0] for param in params], [param._grad for param in params]])
