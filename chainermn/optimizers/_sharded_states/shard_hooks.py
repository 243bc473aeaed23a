"""Calls the hooks of an optimizer on ranks that have only the mean gradients of their shards.

Some of Chainer's hooks process each element independently. Others need norms: each rank sums the
squares of its shard, and one all-reduce sums these sums over all ranks.
"""
from __future__ import annotations

import collections
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import chainer
import numpy as np
from chainer import optimizer_hooks
from chainer.optimizer import GradientMethod

from chainer_compat.updates import update_hooks
from chainermn._types import Array, Object, Optimizer, Parameter


class ShardedParameter(NamedTuple):
    """An initialized parameter and the elements of it that this rank updates."""

    path: str
    param: Parameter
    piece: Parameter  # the elements that this rank updates
    is_counted: bool  # whether this rank counts these elements in norms


#: Function that returns the sum of an array over all ranks.
Total = Callable[[np.ndarray], np.ndarray]
_Call = Callable[[Object, Sequence[ShardedParameter], Total], None]


def needs_all(optimizer: Optimizer) -> bool:
    """Return whether a rank needs the mean gradients of all parameters because of a hook.

    Args:
        optimizer: The optimizer, not a wrapper.
    """
    hookable = optimizer._hookable
    if hookable._post_update_hooks or not all(map(_call_of, hookable._pre_update_hooks.values())):
        return True
    return any(getattr(getattr(optimizer, name), '__func__', None) is not method
               for name, method in _METHODS.items())


def needs_parameters(optimizer: Optimizer) -> bool:
    """Return whether :func:`check_finite` or :func:`call` uses the parameters."""
    return optimizer._loss_scaling_is_dynamic or bool(optimizer._hookable._pre_update_hooks)


def check_finite(optimizer: Optimizer, params: Sequence[ShardedParameter], total: Total) -> None:
    """Check the gradients like ``Optimizer.check_nan_in_grads``."""
    optimizer._loss_scaling_isnan = False
    if not optimizer._loss_scaling_is_dynamic:
        return
    counts = total(np.array([_has_nonfinite(each.piece.grad) for each in params], np.float64))
    for each, count in zip(params, counts, strict=True):
        if count:
            optimizer._loss_scaling_isnan = optimizer._loss_scaling_isnan_ever = True
            warnings.warn(f'Non finite number found in param.grad of {each.path} (iteration: '
                          f'{optimizer.t}, loss_scale: {optimizer._loss_scale})', stacklevel=2)


def call(optimizer: Optimizer, params: Sequence[ShardedParameter], total: Total) -> None:
    """Call the hooks in order."""
    for hook in optimizer._hookable._pre_update_hooks.values():
        function = _call_of(hook)
        assert function is not None
        update_hooks.prepare(hook, [each.piece for each in params])
        function(hook, params, total)


def _call_each(hook: Object, params: Sequence[ShardedParameter], total: Total) -> None:
    for each in params:
        hook(each.param.update_rule, each.piece)


def _clip(hook: Object, params: Sequence[ShardedParameter], total: Total) -> None:
    sums = _square_sums([(each, each.piece.grad) for each in params], total)
    with np.errstate(divide='ignore', over='ignore', invalid='ignore'):
        scale = next((_scale(each.piece) for each in params), 1.)
        rate = float(hook.threshold * scale / np.sqrt(sum(map(float, sums))))
    if rate >= 1:
        return
    for each in params:
        if each.piece.grad is not None:
            each.piece.grad *= rate


def _scale_layers(hook: Object, params: Sequence[ShardedParameter], total: Total) -> None:
    seen: collections.Counter[int] = collections.Counter()
    # A parameter with several paths is scaled several times.
    rounds: dict[int, list[ShardedParameter]] = {}
    for each in params:
        seen[id(each.param)] += 1
        rounds.setdefault(seen[id(each.param)], []).append(each)
    for some in rounds.values():
        sums = _square_sums([(each, x) for each in some
                             for x in (each.piece.array, each.piece.grad)], total)
        for each, p_sum, g_sum in zip(some, sums[::2], sums[1::2], strict=True):
            _scale_layer(hook, each.piece, np.sqrt(p_sum), np.sqrt(g_sum))


def _scale_layer(hook: Object, piece: Parameter, p_norm: np.floating, g_norm: np.floating) -> None:
    if piece.grad is None:
        return
    scale = _scale(piece)
    piece.grad += hook.weight_decay * scale * piece.array
    p_norm, g_norm = np.float64(p_norm), np.float64(g_norm) / scale  # eps is zero in float16
    if p_norm > hook.threshold:
        piece.grad *= p_norm / (hook.eps + g_norm + hook.weight_decay * p_norm)


def _scale(piece: Parameter) -> float:
    return 1. if piece._loss_scale is None else piece._loss_scale


def _square_sums(arrays: Sequence[tuple[ShardedParameter, Array | None]], total: Total
                 ) -> list[np.floating]:
    """Return the sum of the squares of each array over all ranks, in the dtype of its parameter.

    For float16, the sums are float32, as in Chainer.
    """
    local = [_square_sum(x) if each.is_counted and x is not None else 0. for each, x in arrays]
    return [np.promote_types(each.param.dtype, np.float32).type(value)
            for (each, _), value in zip(arrays, total(np.array(local)), strict=True)]


def _square_sum(x: Array) -> float:
    flat = x.ravel()
    if flat.dtype == np.float16:
        flat = flat.astype(np.float32)
    return float(flat.dot(flat))


def _has_nonfinite(x: Array | None) -> bool:
    xp = chainer.backend.get_array_module(x)
    return x is not None and not xp.isfinite(x).all()


#: Methods that this module replaces.
_METHODS = {name: getattr(GradientMethod, name)
            for name in ('call_hook', 'call_hooks', 'check_nan_in_grads')}

_ELEMENTWISE = (optimizer_hooks.WeightDecay, optimizer_hooks.Lasso,
                optimizer_hooks.GradientHardClipping)

#: Functions by the ``__call__`` of a hook, so that subclasses that inherit it are included.
_CALLS: dict[object, _Call] = {
    **{kind.__call__: _call_each for kind in _ELEMENTWISE},
    optimizer_hooks.GradientClipping.__call__: _clip,
    optimizer_hooks.GradientLARS.__call__: _scale_layers,
}


def _call_of(hook: Object) -> _Call | None:
    """Return the function to call a hook on shards; ``None`` if it needs all gradients."""
    function = _CALLS.get(type(hook).__call__)
    is_for_each = getattr(hook, 'call_for_each_param', False)
    return function if is_for_each == (function is not _clip) else None
