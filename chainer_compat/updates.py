"""Updates all parameters of a model in one pass, as their update rules would one after another.

Chainer calls the rule of each parameter. For small parameters, most of the time is spent in calls;
for large ones, each operation of a rule reads them from memory again. Here, parameters with equal
rules are updated together: by one kernel of PyTorch, in blocks (block_updates.py), or on a GPU by
one launch (device_updates.py).

Only Chainer's own classes are updated together. Everything else runs as it is, in its turn.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from chainer_compat import block_updates, device_updates, elementwise
from chainer_compat.update_plans import Plan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

#: By rule: its methods ``update_core_cpu`` and ``update_core_gpu``, which compute each element by
#: itself, and change states in place.
_cores: dict[Any, tuple[Any, Any]] = {}

_DTYPES = np.dtype(np.float32), np.dtype(np.float64)
_DTYPES_ON_DEVICES = np.dtype(np.float16), *_DTYPES

#: Functions that call them, by class and name. If a program replaces one, nothing is grouped.
_callers: dict[tuple[Any, str], Any] = {}

_METHODS = 'update', 'update_core', '_init_states', '_UpdateRule__update'

#: What Chainer sets in a rule. ``initial_alpha`` is of Adam with ``adabound``.
_ATTRIBUTES = frozenset({'_dummy', '_fp32_param', '_hookable', '_state', '_use_fp32_update',
                         'enabled', 'hyperparam', 'initial_alpha', 't'})


class Member:
    """A parameter that is updated with others: its arrays, as they were at its last update."""

    __slots__ = ('data', 'device', 'dtype', 'flat', 'kind', 'n_attributes', 'owners', 'shape',
                 'size', 'states', 'tensors', 'type')

    def __init__(self, data: Array, rule: Any) -> None:
        self.data = data
        self.states = (*rule._state.values(),)
        self.type = type(data)
        self.dtype = data.dtype
        self.shape = data.shape
        self.size = data.size
        #: The number of the GPU; ``None`` for NumPy arrays.
        self.device = None if isinstance(data, np.ndarray) else data.data.device_id
        #: What changes by its update; no two members of a group share any of it.
        self.owners = (id(rule), *(_owner(array) or 0 for array in (data, *self.states)))
        self.n_attributes = len(vars(rule))
        kind = type(rule), data.dtype.char, (*rule._state,), self.device
        self.kind = id(_kinds.setdefault(kind, kind))
        self.flat = ([] if self.device is not None
                     else [array.reshape(-1) for array in (data, *self.states)])
        self.tensors: Any = None  # PyTorch's, which share the memory of the data and states


#: What members of a group share, each once.
_kinds: dict[Hashable, Hashable] = {}
_members: weakref.WeakKeyDictionary[Any, Member] = weakref.WeakKeyDictionary()


#: By model: how its parameters were updated.
_plans: weakref.WeakKeyDictionary[Any, Plan] = weakref.WeakKeyDictionary()


class ParameterGroup:
    """Parameters with equal rules."""

    def __init__(self, rule: Any, loss_scale: float | None) -> None:
        self.rule = rule  # of the first
        self.loss_scale = loss_scale  # None on the CPU
        self.params: list[Any] = []
        self.members: list[Member] = []
        self.grads: list[Array] = []
        #: Whether the members are copies in float32 of parameters in float16.
        self.is_of_halves = False


def accept(rule: Any) -> None:
    """Update parameters with this class of rules together; called before the program runs."""
    from chainer.optimizer import UpdateRule
    from chainer.variable import Parameter

    _cores[rule] = rule.update_core_cpu, rule.update_core_gpu
    for cls, names in ((Parameter, ('update',)), (UpdateRule, _METHODS), (rule, _METHODS)):
        _callers.update(((cls, name), getattr(cls, name)) for name in names)


def update(params: Iterable[Any], model: Any = None) -> None:
    """Call ``update`` of each parameter, or update it together with others.

    Args:
        params: The parameters.
        model: The link that they belong to. If it is given, they are grouped faster next time.
    """
    params = [*params]
    found = None if model is None else update_as_before(params, model)
    if found is not None:
        found()
        return
    plan = _update(params, _accepted())
    if model is None or not isinstance(model, Hashable):
        return
    if plan is not None:
        _plans[model] = plan
    else:
        _plans.pop(model, None)


def update_as_before(params: list[Any], model: Any) -> Callable[[], None] | None:
    """Return a function that updates parameters as the last update of the model did.

    Returns:
        The function; ``None`` if there was none, or anything but the gradients has changed since.
    """
    plan = _plans.get(model) if isinstance(model, Hashable) else None
    if plan is None or not plan.types <= _accepted() or not all(map(_are_numbers, plan.parents)):
        return None
    gradients = plan.gradients(params)
    return None if gradients is None else functools.partial(_update_by, plan, gradients)


def _update_by(plan: Plan, gradients: list[list[Array]]) -> None:
    for group, grads in zip(plan.groups, gradients, strict=True):
        with _advanced(group.rules):
            block_updates.update_group(group.rules[0], group.members, grads, group.kept)


def _update(params: list[Any], accepted: set[Any]) -> Plan | None:
    """Update parameters, and return a plan for the next time, if there can be one."""
    from chainer.variable import Parameter

    groups: dict[Hashable, ParameterGroup] = {}
    changed: set[int] = set()  # what members of the groups change
    read: set[int] = set()  # their gradients
    are_numbers: dict[int, bool] = {}  # by hyperparameters of an optimizer
    can_be_planned = bool(params)
    for param in params:
        rule = param.update_rule
        member = key = None
        if type(param) is Parameter and type(rule) in accepted:
            if not rule.enabled and 'update' not in {*vars(param), *vars(rule)}:
                can_be_planned = False
                continue
            is_half = rule._use_fp32_update and getattr(param._data[0], 'dtype', 0) == np.float16
            member = (_member_of_half if is_half else _member)(param, rule)
        grad = None if member is None else _memory_of(param._grad)
        # A rule may read a gradient again after it has changed data or states in its memory.
        if member is not None and grad not in member.owners:
            key = _key(member, rule, param._loss_scale, are_numbers)
        if member is None or key is None:
            can_be_planned = False
            _update_groups(groups, changed, read)
            param.update()
            continue
        assert grad is not None
        is_copy = member.dtype != param._grad.dtype  # in float32
        owners = member.owners
        if is_copy:
            owners = *owners, _memory_of(param._data[0])
        elif param._loss_scale is not None:
            owners = *owners, grad
        if grad in changed or not (changed.isdisjoint(owners) and read.isdisjoint(owners)):
            can_be_planned = False
            _update_groups(groups, changed, read)
        group = groups.get((key, is_copy))
        if group is None:
            group = groups[key, is_copy] = ParameterGroup(rule, param._loss_scale)
            group.is_of_halves = is_copy
        group.params.append(param)
        group.members.append(member)
        group.grads.append(param._grad)
        changed.update(owners)
        read.add(grad)
    plan = Plan(params, [*groups.values()]) if can_be_planned and all(
        map(_is_simple, params)) else None
    _update_groups(groups, changed, read)
    return plan


def _is_simple(param: Any) -> bool:
    """Whether a parameter is on the CPU, with the hyperparameters of its optimizer only."""
    rule = param.update_rule
    return isinstance(param._data[0], np.ndarray) and (
        'initial_alpha' not in vars(rule) and [*vars(rule.hyperparam)] == ['_parent'])


def count_references(rule: Any, name: str) -> int:
    """Return how many references to a state of a rule are kept here."""
    member = _members.get(rule)
    if member is None or not any(array is rule._state[name] for array in member.states):
        return 0
    return 1 + bool(member.flat) + (member.tensors is not None)


def is_plain(param: Any) -> bool:
    """Whether data and gradient are contiguous CuPy arrays of one shape, dtype and device."""
    from chainer.variable import Parameter

    if type(param) is not Parameter:
        return False
    data, grad = param._data[0], param._grad
    return data is not None and type(data) is type(grad) is _type_on_devices() and (
        (data.dtype, data.shape) == (grad.dtype, grad.shape)
        and all(_is_usable(x, data.data.device_id) for x in (data, grad)))


def _accepted() -> set[Any]:
    """Return the classes of rules of which the program has replaced no function."""
    if any(getattr(cls, name) is not function for (cls, name), function in _callers.items()):
        return set()
    return {cls for cls, (on_cpu, on_gpu) in _cores.items()
            if cls.update_core_cpu is on_cpu and cls.update_core_gpu is on_gpu}


def _key(member: Member, rule: Any, loss_scale: float | None, are_numbers: dict[int, bool]
         ) -> Hashable | None:
    """Return what is equal for members of a group; ``None`` if a hyperparameter is no number."""
    own = rule.hyperparam.__dict__
    parent = own.get('_parent')
    kind: Hashable = member.kind if loss_scale is None else (member.kind, loss_scale)
    if 'initial_alpha' in rule.__dict__:
        if not isinstance(rule.initial_alpha, int | float):
            return None
        kind = kind, rule.initial_alpha
    if id(parent) not in are_numbers:
        are_numbers[id(parent)] = _are_numbers(parent)
    if not are_numbers[id(parent)]:
        return None
    if len(own) == 1:
        return kind, rule.t, id(parent)
    if not _are_numbers(rule.hyperparam):
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


@contextlib.contextmanager
def _advanced(rules: list[Any]) -> Iterator[None]:
    """Count an update of each rule.  If it fails, only that of the first, as Chainer does."""
    rules[0].t += 1
    yield
    for rule in rules[1:]:
        rule.t += 1


def _member(param: Any, rule: Any) -> Member | None:
    """Return the member for a parameter; ``None`` if its rule must run by itself."""
    grad, hooks = param._grad, rule._hookable
    member = _current_member(param, rule)
    if (member is None or type(grad) is not member.type or grad.dtype != member.dtype
            or grad.shape != member.shape or not _is_usable(grad, member.device)
            or not rule.enabled or hooks._pre_update_hooks or hooks._post_update_hooks
            or (param._loss_scale is not None and (
                member.device is None or not is_number_or_none(param._loss_scale)))
            or param._layout is not None
            or 'update' in param.__dict__):
        return None
    return member


def _member_of_half(param: Any, rule: Any) -> Member | None:
    """Return the member for the float32 copy of a parameter in float16, on a GPU."""
    copy, hooks = rule._fp32_param, rule._hookable
    if (copy is None or copy._data[0] is None or not is_plain(param) or 'update' in vars(param)
            or hooks._pre_update_hooks or hooks._post_update_hooks or param._layout is not None
            or not is_number_or_none(param._loss_scale)):
        return None
    member = _current_member(copy, rule)
    if (member is None or not rule.enabled or member.shape != param._grad.shape
            or member.device != param._grad.data.device_id):
        return None
    return member


def _current_member(param: Any, rule: Any) -> Member | None:
    """Return the member for the arrays that a parameter and its rule have now."""
    state = rule._state
    member = _members.get(rule)
    if not (member is not None and member.data is param._data[0]
            and (member.device is not None or member.data.flags.writeable)
            and len(rule.__dict__) == member.n_attributes
            and state is not None and len(state) == len(member.states)):
        member = _new_member(param, rule)
    else:
        for array, other in zip(member.states, state.values()):  # noqa: B905 (for speed)
            if array is not other:
                return _new_member(param, rule)
    return member


def _new_member(param: Any, rule: Any) -> Member | None:
    """Return the member for the arrays of a parameter, if others can be updated with it."""
    data = param._data[0]
    on_device = type(data) is _type_on_devices()
    if not (rule.enabled and rule.__dict__.keys() <= _ATTRIBUTES
            and param._layout is None and 'update' not in param.__dict__
            and (on_device or type(data) is np.ndarray)
            and data.dtype in (_DTYPES_ON_DEVICES if on_device else _DTYPES)):
        return None
    if rule._state is None:
        rule._init_states(param)
    device = data.data.device_id if on_device else None
    for array in (data, *rule._state.values()):
        if not (type(array) is type(data) and array.shape == data.shape
                and array.dtype == data.dtype and _is_usable(array, device)
                and _owner(array) is not None):
            return None
    member = _members[rule] = Member(data, rule)
    return member


def _type_on_devices() -> Any:
    """Return the type of CuPy arrays; ``None`` without CuPy."""
    from chainer.backends import cuda

    return cuda.ndarray if cuda.available else None


def _is_usable(array: Array, device: int | None) -> bool:
    """Whether an array is contiguous, and on a GPU or, if ``device`` is ``None``, writable."""
    if device is None:
        return array.flags.carray
    return array.flags.c_contiguous and array.data.device_id == device  # type: ignore[attr-defined]


def _owner(array: Array) -> int | None:
    """Return what is equal for arrays that may overlap; ``None`` if it is not known."""
    if isinstance(array, np.ndarray):
        owner = array if array.base is None else array.base
        if not (type(owner) is np.ndarray and owner.flags.owndata):
            return None
    return _memory_of(array)


def _memory_of(array: Array) -> int:
    """Return ``_owner(array)``, or what is equal for no array that has one."""
    if type(array) is np.ndarray:
        return id(array if array.base is None else array.base)
    return elementwise.memory_of(array)


def is_number_or_none(value: Any) -> bool:
    """Whether a loss scale is known to be a number."""
    return value is None or isinstance(value, int | float)


def _are_numbers(hyperparam: Any) -> bool:
    return hyperparam is None or all(
        isinstance(value, int | float) or (name == '_parent' and (
            value is None or _are_numbers(value)))
        for name, value in vars(hyperparam).items())
