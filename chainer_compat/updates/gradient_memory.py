"""The array of a gradient: where it is stored, and what else uses it.

Chainer passes arrays on without copies. Backward of ``W + V``, for example, gives both parameters
the same array, which may also be the gradient of an input or an array in user code. Therefore, code
that changes gradients in place, such as hooks and loss scaling, first calls :func:`own`.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np


def gradient_of(param: Any) -> Any:
    """Return ``param.grad``, even if its memory layout is not Chainer's standard layout.

    User code can replace it with ``param.grad_var.array = ...``.
    """
    variable = param._grad_var
    return param._grad if variable is None else variable._data[0]


def own(params: Iterable[Any]) -> None:
    """Copy gradients that are read-only or share memory with anything else.

    A gradient is not copied if only its parameter refers to it. If several gradients are views of
    the same array, nothing else may refer to that array, and the views must not overlap; otherwise
    they are copied.

    Args:
        params: Parameters, which may be repeated or have no gradient.
    """
    shared: list[Any] = []
    views: dict[tuple[bool, int], list[Any]] = {}  # parameters, by the memory of their gradients
    for param in params:
        variable = param._grad_var
        grad = param._grad if variable is None else variable._data[0]
        if grad is None:
            continue
        if param._grad is not grad:
            param._grad = grad
        excess = sys.getrefcount(grad) - _COUNT - (variable is not None)
        base = grad.base
        if excess > 0 or not getattr(grad.flags, 'writeable', True) or (
                base is not None and 0 in grad.strides):
            shared.append(param)
        elif base is not None:
            views.setdefault(_memory(base), []).append(param)
    for others in views.values():
        others = [*{id(param): param for param in others}.values()]
        if _is_used_elsewhere(others) or (
                len(others) > 1 and _overlap([param._grad for param in others])):
            shared += others
    for param in shared:
        with _device_of(param._grad):
            param._set_grad_without_check(param._grad.copy())


def begin_update(rule: Any, param: Any) -> float | None:
    """Return the loss scale of a gradient, by which the update divides it in place."""
    scale: float | None = param._loss_scale
    hooks = rule._hookable
    if scale is not None or hooks._pre_update_hooks or hooks._post_update_hooks:
        own([param])
    return scale


def unscale(params: Iterable[Any]) -> None:
    """Divide gradients by the loss scale, unless they have already been divided.

    Args:
        params: Parameters whose gradients share no memory.
    """
    import chainer

    for param in params:
        scale, grad = param._loss_scale, gradient_of(param)
        if scale is not None and grad is not None:
            with chainer.using_device(param.device):
                grad /= scale
            forget_scale(param)


def forget_scale(param: Any) -> None:
    """Record that a gradient has been divided by the loss scale and must not be divided again."""
    param._last_loss_scale, param._loss_scale = param._loss_scale, None


def last_scale(param: Any) -> float | None:
    """Return the loss scale of the last ``backward()``; ``None`` if there was none."""
    scale: float | None = param._loss_scale
    return getattr(param, '_last_loss_scale', None) if scale is None else scale


def _device_of(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return contextlib.nullcontext()
    import chainer

    return chainer.using_device(chainer.backend.get_device_from_array(array))


def _memory(base: Any) -> tuple[bool, int]:
    """Return a key that is the same for all views of one array or one PyTorch storage."""
    if hasattr(base, 'untyped_storage'):
        return True, base.untyped_storage().data_ptr()
    return False, id(base)


def _is_used_elsewhere(params: list[Any]) -> bool:
    """Return whether anything else refers to the memory that these gradients share."""
    references = [sys.getrefcount(param._grad.base) - _COUNT_OF_BASE for param in params]
    base = params[0]._grad.base
    if not hasattr(base, 'untyped_storage'):
        # The reference count of a NumPy view excludes the users of its PyTorch storage.
        return references[0] > len(params) or hasattr(
            getattr(base, 'base', None), 'untyped_storage')
    import torch

    # The count includes the reference used for counting.
    count = getattr(torch._C, '_storage_Use_Count', None)
    return max(references) > 1 or count is None or (
        count(base.untyped_storage()._cdata) > len(params) + 1)


def _overlap(arrays: list[Any]) -> bool:
    """Return whether the address ranges of arrays overlap."""
    bounds = sorted(map(_bounds, arrays))
    return any(end > begin for (_, end), (begin, _) in itertools.pairwise(bounds))


def _bounds(array: Any) -> tuple[int, int]:
    """Return the addresses of the first byte and after the last one."""
    begin = (array.__array_interface__['data'][0] if isinstance(array, np.ndarray)
             else array.data.ptr)
    steps = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    return (begin + sum(step for step in steps if step < 0),
            begin + sum(step for step in steps if step > 0) + array.itemsize * bool(array.size))


class _Sample:
    """A parameter whose gradient nothing else refers to."""

    _grad_var = None

    def __init__(self, grad: Any) -> None:
        self._grad = grad


def _count() -> int:
    """Return the result of ``sys.getrefcount`` in ``own`` if nothing else refers to an array.

    It depends on the version of Python.
    """
    for param in [_Sample(np.zeros(1))]:
        variable = param._grad_var
        grad = param._grad if variable is None else variable._data[0]
        if param._grad is not grad:
            param._grad = grad
        return sys.getrefcount(grad)
    raise AssertionError


_COUNT = _count()
_sample = _Sample(np.zeros(2)[:1])
#: The count of an array with one view, excluding the view.
_COUNT_OF_BASE = sys.getrefcount(_sample._grad.base) - 1
