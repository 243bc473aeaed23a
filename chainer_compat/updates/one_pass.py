"""Updates all parameters of a model in one pass, instead of calling one rule after another.

Chainer calls the rule of each parameter. For small parameters, most of the time is spent in calls;
for large ones, each operation of a rule reads them from memory again. Here, parameters with
identical rules are updated together: by one PyTorch kernel, in blocks (block_updates.py), or by one
launch on a GPU (device_updates.py).

Only Chainer's own classes are updated together. The methods of all other classes are called as
usual, in the usual order.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from chainer_compat.graph.settings import raises_errors
from chainer_compat.updates import block_updates, device_updates
from chainer_compat.updates.gradient_memory import forget_scale, gradient_of, own, unscale
from chainer_compat.updates.update_groups import (
    Member,
    ParameterGroup,
    member_of,
    member_of_half,
    memory_of,
)
from chainer_compat.updates.update_plans import Plan

if TYPE_CHECKING:
    from chainer_compat.updates.update_groups import Array

#: For each class of elementwise rules that change states in place: the functions that an update
#: calls, by class and name. If user code replaces one of them, Chainer calls the rules as usual.
_functions: dict[Any, dict[tuple[Any, str], Any]] = {}

_METHODS = 'update', 'update_core', '_init_states', '_UpdateRule__update'

#: How the parameters of a model were last updated, by the rule of the first parameter. A plan has
#: no reference to a rule or parameter, which may refer to the model. Therefore, it is freed with
#: the rule, and does not keep the model in memory.
_plans: weakref.WeakKeyDictionary[Any, Plan] = weakref.WeakKeyDictionary()


def accept(rule: Any) -> None:
    """Update parameters with this class of rules together. Call it before user code runs."""
    from chainer.variable import Parameter

    own_functions = [name for name, value in vars(rule).items()
                     if callable(value) or isinstance(value, property)]  # such as ``alpha_t``
    _functions[rule] = {(cls, name): getattr(cls, name) for cls, name in [
        (Parameter, 'update'), *((rule, name) for name in (*_METHODS, *own_functions))]}


def update(params: Iterable[Any], is_repeated: bool = False) -> None:
    """Update parameters, as ``update`` of each parameter would.

    Args:
        params: The parameters.
        is_repeated: Whether the same parameters will be updated again. Their groups are then
            stored, which makes the next update faster.
    """
    params = [*params]
    if raises_errors():  # one by one, so that errors are raised at the right parameter
        for param in params:
            param.update()
        return
    _unscale(params)
    found = update_as_before(params) if is_repeated else None
    if found is not None:
        found()
        return
    plan = _update(params, {*filter(_is_accepted, _functions)})
    if not is_repeated or not params or type(params[0].update_rule) not in _functions:
        return
    if plan is not None:
        _plans[params[0].update_rule] = plan
    else:
        _plans.pop(params[0].update_rule, None)


def _unscale(params: list[Any]) -> None:
    """Divide the gradients of NumPy arrays by the loss scale.

    On a GPU, the kernel of a group divides them. With a float32 copy of the parameter, the rule
    casts the gradient before it is divided. If a parameter or rule has its own ``update``, its
    gradient is the same as without this package.
    """
    from chainer.variable import Parameter

    scaled = [param for param in params if param._loss_scale is not None
              and type(param).update is Parameter.update
              and 'update' not in {*vars(param), *vars(param.update_rule or param)}]
    if scaled:
        own(scaled)
        unscale([param for param in scaled if type(param._data[0]) is np.ndarray
                 and type(param.update_rule) in _functions and param.update_rule.enabled
                 and not param.update_rule._use_fp32_update])


def update_as_before(params: list[Any]) -> Callable[[], None] | None:
    """Return a function that updates parameters as their last update did.

    Returns:
        The function; ``None`` if there was no such update, or if anything except the gradients has
        changed since.
    """
    rule = params[0].update_rule if params else None
    plan = _plans.get(rule) if type(rule) in _functions else None
    if plan is None or raises_errors() or not (all(map(_is_accepted, plan.types))
                            and all(map(has_numbers, plan.parents))):
        return None
    gradients = plan.gradients(params)
    return None if gradients is None else functools.partial(_update_by, plan, params, gradients)


def _update_by(plan: Plan, params: list[Any], gradients: list[list[Array]]) -> None:
    for group, grads in zip(plan.groups, gradients, strict=True):
        rules = [param.update_rule for param in group.of(params)]
        with _advanced(rules):
            block_updates.update_group(rules[0], group.members, grads, group.kept)


def _update(params: list[Any], accepted: set[Any]) -> Plan | None:
    """Update parameters, and return a plan for the next time, if there can be one."""
    from chainer.variable import Parameter

    groups: dict[Hashable, ParameterGroup] = {}
    changed: set[int] = set()  # the memory that members of the groups change
    read: set[int] = set()  # the memory of their gradients
    are_numbers: dict[int, bool] = {}  # by the ID of an optimizer's hyperparameters
    can_be_planned = bool(params)
    for param in params:
        rule = param.update_rule
        member = key = None
        if type(param) is Parameter and type(rule) in accepted:
            if not rule.enabled and 'update' not in {*vars(param), *vars(rule)}:
                can_be_planned = False
                continue
            is_half = rule._use_fp32_update and getattr(param._data[0], 'dtype', 0) == np.float16
            member = (member_of_half if is_half else member_of)(param, rule)
        if member is not None:
            array = gradient_of(param)
            grad = memory_of(array)
            is_copy = member.dtype != array.dtype  # the member is a float32 copy
            owners = member.owners
            if is_copy:
                owners = *owners, memory_of(param._data[0])
            elif param._loss_scale is not None:
                owners = *owners, grad
            if grad in changed or not (changed.isdisjoint(owners) and read.isdisjoint(owners)):
                can_be_planned = False
                _update_groups(groups, changed, read)  # changes the step of a tied parameter's rule
            # If data or states share memory with the gradient, the rule may change the gradient
            # before it reads the gradient again.
            if grad not in member.owners:
                key = _key(member, rule, param._loss_scale, are_numbers)
        if member is None or key is None:
            can_be_planned = False
            _update_groups(groups, changed, read)
            param.update()
            continue
        group = groups.get((key, is_copy))
        if group is None:
            group = groups[key, is_copy] = ParameterGroup(rule, param._loss_scale)
            group.is_of_halves = is_copy
        group.params.append(param)
        group.members.append(member)
        group.grads.append(array)
        changed.update(owners)
        read.add(grad)
    plan = Plan(params, [*groups.values()]) if can_be_planned and all(
        map(_is_simple, params)) else None
    _update_groups(groups, changed, read)
    return plan


def _is_simple(param: Any) -> bool:
    """Return whether a parameter is on the CPU and has no hyperparameters of its own."""
    rule = param.update_rule
    return isinstance(param._data[0], np.ndarray) and (
        'initial_alpha' not in vars(rule) and [*vars(rule.hyperparam)] == ['_parent'])


def is_unchanged(rule: Any) -> bool:
    """Return whether a class of rules is Chainer's, and none of its functions has been replaced.

    A function in user code, such as ``alpha_t``, may read states, which change during an update.
    """
    return rule in _functions and _is_accepted(rule)


def share_memory(arrays: list[Array]) -> bool:
    """Return whether any two NumPy arrays may share memory; then the order of updates matters."""
    return any(np.may_share_memory(x, y) for x, y in itertools.combinations(arrays, 2))


def _is_accepted(rule: Any) -> bool:
    """Return whether user code has replaced none of the functions that these rules call."""
    return all([getattr(cls, name) is function
                for (cls, name), function in _functions[rule].items()])


def _key(member: Member, rule: Any, loss_scale: float | None, are_numbers: dict[int, bool]
         ) -> Hashable | None:
    """Return the key of a member's group; ``None`` if a hyperparameter is not a number."""
    own = rule.hyperparam.__dict__
    parent = own.get('_parent')
    kind: Hashable = member.kind if loss_scale is None else (member.kind, loss_scale)
    if 'initial_alpha' in rule.__dict__:
        if not isinstance(rule.initial_alpha, int | float):
            return None
        kind = kind, rule.initial_alpha
    if id(parent) not in are_numbers:
        are_numbers[id(parent)] = has_numbers(parent)
    if not are_numbers[id(parent)]:
        return None
    if len(own) == 1:
        return kind, rule.t, id(parent)
    if not has_numbers(rule.hyperparam):
        return None
    values = sorted((name, own[name]) for name in own if name != '_parent')
    return kind, rule.t, id(parent), *values


def _update_groups(groups: dict[Hashable, ParameterGroup], changed: set[int], read: set[int]
                   ) -> None:
    found = [*groups.values()]
    groups.clear()
    changed.clear()
    read.clear()
    for group in found:
        with _advanced([param.update_rule for param in group.params]):
            _update_group(group)


def _update_group(group: ParameterGroup) -> None:
    if group.members[0].device is None:
        block_updates.update_group(group.rule, group.members, group.grads)
    elif group.is_of_halves:
        grads = device_updates.cast(group.grads, [np.dtype(np.float32)] * len(group.grads))
        device_updates.update_group(group.rule, group.members, grads, group.loss_scale)
        device_updates.cast([member.data for member in group.members],
                            [param._data[0] for param in group.params])
    else:
        device_updates.update_group(group.rule, group.members, group.grads, group.loss_scale)
        for param in group.params:
            forget_scale(param)


@contextlib.contextmanager
def _advanced(rules: list[Any]) -> Iterator[None]:
    """Count an update of each rule. If it fails, count only the first, as Chainer does."""
    rules[0].t = step = rules[0].t + 1
    yield
    for rule in rules:
        rule.t = step


def has_numbers(hyperparam: Any) -> bool:
    """Return whether all hyperparameters are numbers, rather than arrays."""
    return hyperparam is None or all(
        isinstance(value, int | float) or (name == '_parent' and (
            value is None or has_numbers(value)))
        for name, value in vars(hyperparam).items())
