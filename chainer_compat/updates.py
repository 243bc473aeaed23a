"""Updates all parameters of a model in one pass, as their update rules would one after another.

Chainer calls the rule of each parameter. For small parameters, most of the time is spent in calls;
for large ones, each operation of a rule reads them from memory again. Here, parameters with equal
rules are updated together: by one kernel of PyTorch, or by the rule itself, which gets blocks of
many parameters, or of a part of one. Blocks stay in the cache, and results are bitwise identical.

Only Chainer's own classes are updated together. Everything else runs as it is, in its turn.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from chainer_compat.torch_kernels.dispatch import with_kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

#: Elements of a block. Its temporary arrays stay in the cache of a core.
BLOCK = 1 << 14

#: By rule: its method ``update_core_cpu``, which computes each element by itself, and changes
#: states in place.
_cores: dict[Any, Any] = {}

#: Functions around it, by class and name. If a program replaces one, it is called.
_around: dict[tuple[Any, str], Any] = {}

#: What Chainer sets in a rule. ``initial_alpha`` is of Adam with ``adabound``.
_ATTRIBUTES = frozenset({'_fp32_param', '_hookable', '_state', '_use_fp32_update', 'enabled',
                         'hyperparam', 'initial_alpha', 't'})


class Block:
    """A part of a parameter, or several parameters, as update rules use it."""

    def __init__(self, data: Array, grad: Array) -> None:
        self.data = data
        self.grad = grad
        self.dtype = data.dtype


class Member:
    """A parameter that is updated with others: its arrays, as they were at its last update."""

    __slots__ = ('data', 'dtype', 'flat', 'kind', 'n_attributes', 'owners', 'shape', 'size',
                 'states', 'tensors')

    def __init__(self, data: Array, rule: Any) -> None:
        self.data = data
        self.states = (*rule._state.values(),)
        self.dtype = data.dtype
        self.shape = data.shape
        self.size = data.size
        #: What changes by its update; no two members of a group share any of it.
        self.owners = (id(rule), *(id(_owner(array)) for array in (data, *self.states)))
        self.n_attributes = len(vars(rule))
        kind = type(rule), data.dtype.char, vars(rule).get('initial_alpha'), (*rule._state,)
        self.kind = id(_kinds.setdefault(kind, kind))
        self.flat = [array.reshape(-1) for array in (data, *self.states)]
        self.tensors: Any = None  # PyTorch's, which share the memory of the data and states


#: What members of a group share, each once.
_kinds: dict[Hashable, Hashable] = {}
_members: weakref.WeakKeyDictionary[Any, Member] = weakref.WeakKeyDictionary()


class ParameterGroup:
    """Parameters with equal rules."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule  # of the first
        self.members: list[Member] = []
        self.grads: list[Array] = []


def accept(rule: Any) -> None:
    """Update parameters with this class of rules together; called before the program runs."""
    from chainer.optimizer import UpdateRule
    from chainer.variable import Parameter

    _cores[rule] = rule.update_core_cpu
    for cls, names in ((Parameter, ('update',)), (UpdateRule, (
            'update', 'update_core', '_init_states', '_UpdateRule__update'))):
        _around.update(((cls, name), getattr(cls, name)) for name in names)


def update(params: Iterable[Any]) -> None:
    """Call ``update`` of each parameter, or update it together with others."""
    from chainer.variable import Parameter

    groups: dict[Hashable, ParameterGroup] = {}
    seen: set[int] = set()  # what members of the groups change
    are_numbers: dict[int, bool] = {}  # by hyperparameters of an optimizer
    accepted = _accepted()
    for param in params:
        rule = param.update_rule
        member = key = None
        if type(param) is Parameter and type(rule) in accepted:
            if not rule.enabled and 'update' not in {*vars(param), *vars(rule)}:
                continue
            member = _member(param, rule)
        if member is not None:
            key = _key(member, rule, are_numbers)
        if member is None or key is None:
            _update_groups(groups, seen)
            param.update()
            continue
        if not seen.isdisjoint(member.owners):
            _update_groups(groups, seen)
        group = groups.get(key)
        if group is None:
            group = groups[key] = ParameterGroup(rule)
        rule.t += 1
        group.members.append(member)
        group.grads.append(param._grad)
        seen.update(member.owners)
    _update_groups(groups, seen)


def _accepted() -> set[Any]:
    """Return the classes of rules of which the program has replaced no function."""
    if any(getattr(cls, name) is not function for (cls, name), function in _around.items()):
        return set()
    return {cls for cls, core in _cores.items() if cls.update_core_cpu is core}


def _key(member: Member, rule: Any, are_numbers: dict[int, bool]) -> Hashable | None:
    """Return what is equal for members of a group; ``None`` if a hyperparameter is no number."""
    own = rule.hyperparam.__dict__
    parent = own.get('_parent')
    if id(parent) not in are_numbers:
        are_numbers[id(parent)] = _are_numbers(parent)
    if not are_numbers[id(parent)]:
        return None
    if len(own) == 1:
        return member.kind, rule.t, id(parent)
    if not _are_numbers(rule.hyperparam):
        return None
    values = sorted((name, own[name]) for name in own if name != '_parent')
    return member.kind, rule.t, id(parent), *values


def _update_groups(groups: dict[Hashable, ParameterGroup], seen: set[int]) -> None:
    for group in groups.values():
        update_group(group.rule, group.members, group.grads)
    groups.clear()
    seen.clear()


def _member(param: Any, rule: Any) -> Member | None:
    """Return the member for a parameter; ``None`` if its rule must run by itself."""
    grad, state, hooks = param._grad, rule._state, rule._hookable
    member = _members.get(rule)
    if not (member is not None and member.data is param._data[0]
            and member.data.flags.writeable and len(rule.__dict__) == member.n_attributes
            and state is not None and len(state) == len(member.states)):
        member = _new_member(param, rule)
    else:
        for array, other in zip(member.states, state.values()):  # noqa: B905 (for speed)
            if array is not other:
                member = _new_member(param, rule)
                break
    if (member is None or type(grad) is not np.ndarray or grad.dtype != member.dtype
            or grad.shape != member.shape or not grad.flags.carray or not rule.enabled
            or hooks._pre_update_hooks or hooks._post_update_hooks
            or param._loss_scale is not None or param._layout is not None
            or 'update' in param.__dict__):
        return None
    return member


def _new_member(param: Any, rule: Any) -> Member | None:
    """Return the member for the arrays of a parameter, if others can be updated with it."""
    data = param._data[0]
    if not (rule.enabled and rule.__dict__.keys() <= _ATTRIBUTES and type(data) is np.ndarray
            and data.dtype in (np.float32, np.float64)):
        return None
    if rule._state is None:
        rule._init_states(param)
    for array in (data, *rule._state.values()):
        if not (type(array) is np.ndarray and array.shape == data.shape and array.flags.carray
                and array.dtype == data.dtype and type(_owner(array)) is np.ndarray
                and _owner(array).flags.owndata):
            return None
    member = _members[rule] = Member(data, rule)
    return member


def _owner(array: Array) -> Array:
    """Return the array that owns the memory, which is equal for arrays that may overlap."""
    return array if array.base is None else array.base


def _are_numbers(hyperparam: Any) -> bool:
    return hyperparam is None or all(
        isinstance(value, bool | int | float) or (name == '_parent' and (
            value is None or _are_numbers(value)))
        for name, value in vars(hyperparam).items())


@with_kernel('updates.update_group')
def update_group(rule: Any, members: list[Member], grads: list[Array]) -> None:
    """Update parameters.

    Args:
        rule: The rule of the first. The rules of all are equal.
        members: Their arrays.
        grads: Their gradients.
    """
    names, states = [*rule._state], rule._state
    try:
        for arrays, grad in _blocks(members, grads):
            rule._state = dict(zip(names, arrays[1:], strict=True))
            rule.update_core_cpu.__wrapped__(rule, Block(arrays[0], grad))  # not PyTorch
    finally:
        rule._state = states


def _blocks(members: list[Member], grads: list[Array]) -> Iterator[tuple[list[Array], Array]]:
    """Yield arrays of at most ``BLOCK`` elements: data and states, and the gradient.

    Changes of the arrays are written back when the next ones are asked for.
    """
    flats: list[list[Array]] = []  # of small parameters: data, states and gradient
    size = 0
    for member, grad in zip(members, grads, strict=True):
        flat = [*member.flat, grad.reshape(-1)]
        if 2 * member.size >= BLOCK:
            for start in range(0, member.size, BLOCK):
                *arrays, part = (array[start:start + BLOCK] for array in flat)
                yield arrays, part
            continue
        if size + member.size > BLOCK:
            yield from _joined(flats)
            flats, size = [], 0
        flats.append(flat)
        size += member.size
    if flats:
        yield from _joined(flats)


def _joined(flats: list[list[Array]]) -> Iterator[tuple[list[Array], Array]]:
    *arrays, grad = flats[0] if len(flats) == 1 else map(np.concatenate, zip(*flats, strict=True))
    yield arrays, grad
    if len(flats) == 1:
        return
    start = 0
    for flat in flats:
        stop = start + flat[0].size
        for array, joined in zip(flat, arrays, strict=False):  # without the gradient
            array[...] = joined[start:stop]
        start = stop
