"""Updates all parameters of a model in one pass, as their update rules would one after another.

Chainer calls the rule of each parameter. For small parameters, most of the time is spent in calls;
for large ones, each operation of a rule reads them from memory again. Here, parameters with equal
rules are updated together: by one kernel of PyTorch, or by the rule itself, which gets blocks of
many parameters, or of a part of one. Blocks stay in the cache, and results are bitwise identical.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from chainer_compat.torch_kernels.dispatch import with_kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

#: Elements of a block. Its temporary arrays stay in the cache of a core.
BLOCK = 1 << 14

#: Functions ``update_core_cpu`` of Chainer's rules: they compute each element by itself, and change
#: states in place.
cores: set[Any] = set()

#: What members of a group share, each once.
_kinds: dict[Hashable, Hashable] = {}

_CORE = 'update_core_cpu'
#: Methods of ``UpdateRule`` around it; rules that override them run as they are.
_AROUND = ('update', 'update_core', '_init_states', '_UpdateRule__update')


class Block:
    """A part of a parameter, or several parameters, as update rules use it."""

    def __init__(self, data: Array, grad: Array) -> None:
        self.data = data
        self.grad = grad
        self.dtype = data.dtype


class Member:
    """A parameter that is updated with others: its arrays, as they were at its last update."""

    __slots__ = ('data', 'dtype', 'flat', 'kind', 'n_attributes', 'owner', 'shape', 'size',
                 'states', 'tensors')

    def __init__(self, param: Any, rule: Any) -> None:
        self.data = param._data[0]
        self.states = (*rule._state.values(),)
        self.dtype = self.data.dtype
        self.shape = self.data.shape
        self.size = self.data.size
        self.owner = id(_owner(self.data))
        self.n_attributes = len(vars(rule)) + 1  # itself
        #: Equal for all members of a group. ``initial_alpha`` is of Adam with adabound.
        kind = type(rule), self.dtype.char, vars(rule).get('initial_alpha')
        self.kind = id(_kinds.setdefault(kind, kind))
        self.flat = [array.reshape(-1) for array in (self.data, *self.states)]
        self.tensors: Any = None  # PyTorch's, which share the memory of the data and states

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Return what pickle and copy restore: nothing, as arrays of a copy are others."""
        return _nothing, ()


def _nothing() -> None:
    """Return the member of a copied rule."""


class ParameterGroup:
    """Parameters with equal rules."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule  # of the first
        self.members: list[Member] = []
        self.grads: list[Array] = []


def update(params: Iterable[Any]) -> None:
    """Call ``update`` of each parameter, or update it together with others."""
    groups: dict[Hashable, ParameterGroup] = {}
    known: dict[tuple[type, type], bool] = {}
    seen: set[int] = set()  # arrays of the groups: tied parameters see each other's updates
    for param in params:
        rule = param.update_rule
        kinds = type(param), type(rule)
        if kinds not in known:
            known[kinds] = _are_known(*kinds)
        member = _member(param, rule) if known[kinds] else None
        if member is None or member.owner in seen:
            _update_groups(groups)
            seen.clear()
        if member is None:
            param.update()
        elif rule.enabled:
            key = _key(member, rule)
            rule.t += 1
            grad = param._grad
            if param._loss_scale is not None:
                grad /= param._loss_scale
            group = groups.get(key)
            if group is None:
                group = groups[key] = ParameterGroup(rule)
            group.members.append(member)
            group.grads.append(grad)
            seen.add(member.owner)
    _update_groups(groups)


def _update_groups(groups: dict[Hashable, ParameterGroup]) -> None:
    for group in groups.values():
        update_group(group.rule, group.members, group.grads)
    groups.clear()


def _are_known(param: type, rule: type) -> bool:
    from chainer import Parameter
    from chainer.optimizer import UpdateRule

    return (getattr(param, 'update', None) is Parameter.update
            and getattr(rule, _CORE, None) in cores
            and all(getattr(rule, name) is getattr(UpdateRule, name) for name in _AROUND))


def _member(param: Any, rule: Any) -> Member | None:
    """Return the member for a parameter; ``None`` if its rule must run by itself."""
    grad, state = param._grad, rule._state
    member: Member | None = rule.__dict__.get('_member')
    if not (member is not None and member.data is param._data[0]
            and len(rule.__dict__) == member.n_attributes
            and state is not None and len(state) == len(member.states)):
        member = _new_member(param, rule)
    else:
        for array, other in zip(member.states, state.values()):  # noqa: B905 (for speed)
            if array is not other:
                member = _new_member(param, rule)
                break
    hooks = rule._hookable
    if (member is None or type(grad) is not np.ndarray or grad.dtype is not member.dtype
            or grad.shape != member.shape or not grad.flags.carray
            or hooks._pre_update_hooks or hooks._post_update_hooks or param._layout is not None
            or not (len(rule.hyperparam.__dict__) == 1 or _are_numbers(rule.hyperparam))):
        return None
    return member


def _are_numbers(hyperparam: Any) -> bool:
    return all(name == '_parent' or isinstance(value, bool | int | float)
               for name, value in vars(hyperparam).items())


def _key(member: Member, rule: Any) -> Hashable:
    """Return what is equal for members of a group."""
    own = rule.hyperparam.__dict__
    if len(own) == 1 and '_parent' in own:
        return member.kind, rule.t, id(own['_parent'])
    return (member.kind, rule.t, id(own.get('_parent')),
            *((name, own[name]) for name in sorted(own) if name != '_parent'))


def _owner(array: Array) -> Array:
    """Return the array that owns the memory, which is equal for arrays that may overlap."""
    return array if array.base is None else array.base


def _new_member(param: Any, rule: Any) -> Member | None:
    """Return the member for the arrays of a parameter, if others can be updated with it."""
    data = param._data[0]
    rule.__dict__.pop('_member', None)
    if not rule.enabled or not rule.__dict__.keys().isdisjoint((*_AROUND, _CORE)):
        return None
    if type(data) is not np.ndarray or data.dtype not in (np.float32, np.float64):
        return None
    if not (type(_owner(data)) is np.ndarray and _owner(data).flags.owndata):
        return None
    if rule._state is None:
        rule._init_states(param)
    if not all(type(array) is np.ndarray and array.shape == data.shape
               and array.flags.carray and array.dtype == data.dtype
               for array in (data, *rule._state.values())):
        return None
    rule._member = member = Member(param, rule)
    return member


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
