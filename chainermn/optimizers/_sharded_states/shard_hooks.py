"""Hooks of an optimizer whose ranks have the mean gradients of their shards only.

Some of Chainer's hooks compute each element by itself.  Others need norms: each rank sums the
squares of its shard, and the ranks exchange one array of sums.
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

from chainermn._types import Array, Object, Optimizer, Parameter


class Member(NamedTuple):
    """An initialized parameter, as this rank sees it."""

    path: str
    param: Parameter
    piece: Parameter  # with the elements that this rank updates
    is_counted: bool  # whether no other rank counts these elements


#: Returns the sum of an array over all ranks.
Total = Callable[[np.ndarray], np.ndarray]
_Call = Callable[[Object, Sequence[Member], Total], None]


def needs_all(optimizer: Optimizer) -> bool:
    """Return whether a rank needs the mean gradients of all parameters, for a hook.

    Args:
        optimizer: The optimizer, not a wrapper.
    """
    hookable = optimizer._hookable
    return bool(hookable._post_update_hooks) or any(
        _call_of(hook) is None for hook in hookable._pre_update_hooks.values()) or any(
        getattr(optimizer, name).__func__ is not method for name, method in _METHODS.items())


def check_finite(optimizer: Optimizer, members: Sequence[Member], total: Total) -> None:
    """Like ``Optimizer.check_nan_in_grads``."""
    optimizer._loss_scaling_isnan = False
    if not optimizer._loss_scaling_is_dynamic:
        return
    counts = total(np.array([_has_nonfinite(member.piece.grad) for member in members], np.float64))
    for member, count in zip(members, counts, strict=True):
        if count:
            optimizer._loss_scaling_isnan = optimizer._loss_scaling_isnan_ever = True
            warnings.warn(f'Non finite number found in param.grad of {member.path} (iteration: '
                          f'{optimizer.t}, loss_scale: {optimizer._loss_scale})', stacklevel=2)


def call(optimizer: Optimizer, members: Sequence[Member], total: Total) -> None:
    """Call the hooks in their order."""
    for hook in optimizer._hookable._pre_update_hooks.values():
        function = _call_of(hook)
        assert function is not None
        function(hook, members, total)


def _call_each(hook: Object, members: Sequence[Member], total: Total) -> None:
    for member in members:
        hook(member.param.update_rule, member.piece)


def _clip(hook: Object, members: Sequence[Member], total: Total) -> None:
    sums = _square_sums([(member, member.piece.grad) for member in members], total)
    with np.errstate(divide='ignore', over='ignore', invalid='ignore'):
        rate = hook.threshold / np.sqrt(sum(sums, 0.))
    if rate >= 1:
        return
    for member in members:
        if member.piece.grad is not None:
            member.piece.grad *= rate


def _scale_layers(hook: Object, members: Sequence[Member], total: Total) -> None:
    seen: collections.Counter[int] = collections.Counter()
    rounds: dict[int, list[Member]] = {}  # a parameter under several paths is scaled several times
    for member in members:
        seen[id(member.param)] += 1
        rounds.setdefault(seen[id(member.param)], []).append(member)
    for some in rounds.values():
        sums = _square_sums([(member, x) for member in some
                             for x in (member.piece.array, member.piece.grad)], total)
        for member, p_sum, g_sum in zip(some, sums[::2], sums[1::2], strict=True):
            _scale_layer(hook, member.piece, np.sqrt(p_sum), np.sqrt(g_sum))


def _scale_layer(hook: Object, piece: Parameter, p_norm: np.floating, g_norm: np.floating) -> None:
    if piece.grad is None:
        return
    piece.grad += hook.weight_decay * piece.array
    if p_norm > hook.threshold:
        piece.grad *= float(p_norm / (hook.eps + g_norm + hook.weight_decay * p_norm))


def _square_sums(arrays: Sequence[tuple[Member, Array | None]], total: Total) -> list[np.floating]:
    """Return the sum of the squares of each array over all ranks, in the dtype of its parameter."""
    own = [_square_sum(x) if member.is_counted and x is not None else 0. for member, x in arrays]
    with np.errstate(over='ignore'):  # of float16, as in Chainer
        return [member.param.dtype.type(value)
                for (member, _), value in zip(arrays, total(np.array(own)), strict=True)]


def _square_sum(x: Array) -> float:
    wide = x.ravel().astype(np.promote_types(x.dtype, np.float32), copy=False)
    return float(wide.dot(wide))


def _has_nonfinite(x: Array | None) -> bool:
    xp = chainer.backend.get_array_module(x)
    return x is not None and not xp.isfinite(x).all()


#: Methods that this module replaces.
_METHODS = {name: getattr(GradientMethod, name)
            for name in ('call_hook', 'call_hooks', 'check_nan_in_grads')}

_ELEMENTWISE = (optimizer_hooks.WeightDecay, optimizer_hooks.Lasso,
                optimizer_hooks.GradientHardClipping)

#: By method ``__call__`` of a hook, so also for subclasses that inherit it.
_CALLS: dict[object, _Call] = {
    **{kind.__call__: _call_each for kind in _ELEMENTWISE},
    optimizer_hooks.GradientClipping.__call__: _clip,
    optimizer_hooks.GradientLARS.__call__: _scale_layers,
}


def _call_of(hook: Object) -> _Call | None:
    """Return what calls a hook on shards; ``None`` for hooks that need all gradients."""
    function = _CALLS.get(type(hook).__call__)
    is_for_each = getattr(hook, 'call_for_each_param', False)
    return function if is_for_each == (function is not _clip) else None
