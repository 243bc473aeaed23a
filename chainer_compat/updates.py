"""Updates all parameters of a model in one pass, as their update rules would one after another.

Chainer calls the rule of each parameter. For small parameters, most of the time is spent in calls;
for large ones, each operation of a rule reads them from memory again. Here, parameters with equal
rules are updated together: by one kernel of PyTorch, or by the rule itself, which gets blocks of
many parameters, or of a part of one. Blocks stay in the cache, and results are bitwise identical.
On a GPU, one launch of the rule's kernel updates them.

Only Chainer's own classes are updated together. Everything else runs as it is, in its turn.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from chainer_compat import device_gradients, elementwise
from chainer_compat.torch_kernels.dispatch import with_kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

#: Elements of a block, whose temporary arrays should stay in the cache. Smaller ones spend more
#: time in Python: for MomentumSGD of ResNet-50, 1 << 14 took twice as long.
BLOCK = 1 << 17

#: By rule: its methods ``update_core_cpu`` and ``update_core_gpu``, which compute each element by
#: itself, and change states in place.
_cores: dict[Any, tuple[Any, Any]] = {}

_DTYPES = np.dtype(np.float32), np.dtype(np.float64)
_DTYPES_ON_DEVICES = np.dtype(np.float16), *_DTYPES

#: By class of a hook: its ``__call__``, which changes each element of the gradient by itself.
_hooks: dict[Any, Any] = {}

#: Functions around it, by class and name. If a program replaces one, it is called.
_around: dict[tuple[Any, str], Any] = {}

_METHODS = 'update', 'update_core', '_init_states', '_UpdateRule__update'

#: What Chainer sets in a rule. ``initial_alpha`` is of Adam with ``adabound``.
_ATTRIBUTES = frozenset({'_dummy', '_fp32_param', '_hookable', '_state', '_use_fp32_update',
                         'enabled', 'hyperparam', 'initial_alpha', 't'})


class Block:
    """A part of a parameter, or several parameters, as update rules use it."""

    def __init__(self, data: Array, grad: Array) -> None:
        self.data = data
        self.grad = grad
        self.dtype = data.dtype


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


class ParameterGroup:
    """Parameters with equal rules."""

    def __init__(self, rule: Any, loss_scale: float | None) -> None:
        self.rule = rule  # of the first
        self.loss_scale = loss_scale  # None on the CPU
        self.members: list[Member] = []
        self.grads: list[Array] = []
        #: Parameters in float16, of which the members are copies in float32.
        self.halves: list[Any] = []


def accept(rule: Any) -> None:
    """Update parameters with this class of rules together; called before the program runs."""
    from chainer.optimizer import UpdateRule
    from chainer.variable import Parameter

    _cores[rule] = rule.update_core_cpu, rule.update_core_gpu
    for cls, names in ((Parameter, ('update',)), (UpdateRule, _METHODS), (rule, _METHODS)):
        _around.update(((cls, name), getattr(cls, name)) for name in names)


def accept_hook(hook: Any) -> None:
    """Call this class of hooks for many parameters together; called before the program runs."""
    _hooks[hook] = hook.__call__


def update(params: Iterable[Any]) -> None:
    """Call ``update`` of each parameter, or update it together with others."""
    from chainer.variable import Parameter

    groups: dict[Hashable, ParameterGroup] = {}
    changed: set[int] = set()  # what members of the groups change
    read: set[int] = set()  # their gradients
    are_numbers: dict[int, bool] = {}  # by hyperparameters of an optimizer
    accepted = _accepted()
    for param in params:
        rule = param.update_rule
        member = key = None
        if type(param) is Parameter and type(rule) in accepted:
            if not rule.enabled and 'update' not in {*vars(param), *vars(rule)}:
                continue
            is_half = rule._use_fp32_update and getattr(param._data[0], 'dtype', 0) == np.float16
            member = (_member_of_half if is_half else _member)(param, rule)
        if member is not None:
            key = _key(member, rule, param._loss_scale, are_numbers)
        if member is None or key is None:
            _update_groups(groups, changed, read)
            param.update()
            continue
        grad = _memory_of(param._grad)
        is_copy = member.dtype != param._grad.dtype  # in float32
        owners = member.owners
        if is_copy:
            owners = *owners, _memory_of(param._data[0])
        elif param._loss_scale is not None:
            owners = *owners, grad
        if grad in changed or not (changed.isdisjoint(owners) and read.isdisjoint(owners)):
            _update_groups(groups, changed, read)
        group = groups.get((key, is_copy))
        if group is None:
            group = groups[key, is_copy] = ParameterGroup(rule, param._loss_scale)
        rule.t += 1
        if is_copy:
            group.halves.append(param)
        group.members.append(member)
        group.grads.append(param._grad)
        changed.update(owners)
        read.add(grad)
    _update_groups(groups, changed, read)


def call_hook(hook: Any, params: Iterable[Any]) -> None:
    """Call a hook for each parameter; on a GPU with one launch, if it launches one for each."""
    kind, rest = type(hook), [*params]
    if kind in _hooks and kind.__call__ is _hooks[kind] and '__call__' not in vars(hook):
        groups: dict[Hashable, list[Any]] = {}
        for param in rest:
            if _is_plain(param) and _is_number_or_none(param._loss_scale):
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
    with chainer.using_device(param.device):  # whose stream computes the gradient
        return bool(xp.all(xp.isfinite(param.grad)))


def _is_plain(param: Any) -> bool:
    """Whether data and gradient are contiguous CuPy arrays of one shape, dtype and device."""
    from chainer.variable import Parameter

    if type(param) is not Parameter:
        return False
    data, grad = param._data[0], param._grad
    return data is not None and type(data) is type(grad) is _type_on_devices() and (
        (data.dtype, data.shape) == (grad.dtype, grad.shape)
        and all(_is_usable(x, data.data.device_id) for x in (data, grad)))


def _called_together(hook: Any, params: list[Any]) -> bool:
    from chainer.backends.cuda import cupy

    first = params[0]
    with cupy.cuda.Device(first._grad.data.device_id):
        with elementwise.recorded() as calls:
            hook(first.update_rule, first)
        return len(calls) == 1 and elementwise.launch(
            calls[0], [first._data[0], first._grad],
            [[param._data[0] for param in params], [param._grad for param in params]])


def _accepted() -> set[Any]:
    """Return the classes of rules of which the program has replaced no function."""
    if any(getattr(cls, name) is not function for (cls, name), function in _around.items()):
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
    for group in groups.values():
        if group.members[0].device is None:
            update_group(group.rule, group.members, group.grads)
        elif group.halves:
            grads = cast(group.grads, [np.dtype(np.float32)] * len(group.grads))
            update_on_device(group.rule, group.members, grads, group.loss_scale)
            cast([member.data for member in group.members],
                 [param._data[0] for param in group.halves])
        else:
            update_on_device(group.rule, group.members, group.grads, group.loss_scale)
    groups.clear()
    changed.clear()
    read.clear()


def _member(param: Any, rule: Any) -> Member | None:
    """Return the member for a parameter; ``None`` if its rule must run by itself."""
    grad, hooks = param._grad, rule._hookable
    member = _current_member(param, rule)
    if (member is None or type(grad) is not member.type or grad.dtype != member.dtype
            or grad.shape != member.shape or not _is_usable(grad, member.device)
            or not rule.enabled or hooks._pre_update_hooks or hooks._post_update_hooks
            or (param._loss_scale is not None and (
                member.device is None or not _is_number_or_none(param._loss_scale)))
            or param._layout is not None
            or 'update' in param.__dict__):
        return None
    return member


def _member_of_half(param: Any, rule: Any) -> Member | None:
    """Return the member for the float32 copy of a parameter in float16, on a GPU."""
    copy, hooks = rule._fp32_param, rule._hookable
    if (copy is None or copy._data[0] is None or not _is_plain(param) or 'update' in vars(param)
            or hooks._pre_update_hooks or hooks._post_update_hooks or param._layout is not None
            or not _is_number_or_none(param._loss_scale)):
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


def _is_number_or_none(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def _are_numbers(hyperparam: Any) -> bool:
    return hyperparam is None or all(
        isinstance(value, int | float) or (name == '_parent' and (
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


def update_on_device(rule: Any, members: list[Member], grads: list[Array],
                     loss_scale: float | None) -> None:
    """Update parameters of one GPU, with one launch if the rule launches one kernel for each.

    Gradients are divided by the loss scale before.
    """
    from chainer.backends.cuda import cupy

    names, states = [*rule._state], rule._state
    first = Block(members[0].data, grads[0])
    with cupy.cuda.Device(members[0].device):
        with elementwise.recorded() as calls:
            if _can_be_recorded(rule):
                rule.update_core_gpu(first)
        if len(calls) == 1 and elementwise.launch(
                calls[0], [first.data, first.grad, *members[0].states],
                [[member.data for member in members], grads,
                 *zip(*(member.states for member in members), strict=True)],
                None if loss_scale is None else 1, 1. if loss_scale is None else loss_scale):
            return
        try:
            for member, grad in zip(members, grads, strict=True):
                if loss_scale is not None:
                    grad /= loss_scale
                rule._state = dict(zip(names, member.states, strict=True))
                rule.update_core_gpu(Block(member.data, grad))
        finally:
            rule._state = states


def cast(arrays: list[Any], results: list[Any]) -> list[Any]:
    """Cast CuPy arrays of a dtype to arrays, or to new ones of a dtype, by one launch."""
    from chainer.backends.cuda import cupy

    with cupy.cuda.Device(arrays[0].data.device_id):
        results = [cupy.empty(array.shape, result) if isinstance(result, np.dtype) else result
                   for array, result in zip(arrays, results, strict=True)]
        kernel = elementwise.elementwise('S x', 'T y', 'y = (T)x', 'cast')
        elementwise.launch((kernel, (arrays[0], results[0])), [arrays[0], results[0]],
                           [arrays, results])
    return results


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


def _can_be_recorded(rule: Any) -> bool:
    """Whether the program has replaced no kernel, which would be launched instead of recorded."""
    return all(value is None or type(value) is elementwise.Kernel
               for name, value in vars(type(rule)).items() if name.endswith('_kernel'))
