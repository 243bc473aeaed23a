"""Groups of parameters that are updated together, and the conditions for this.

A rule must be one of Chainer's rules and have no hooks; arrays must be contiguous and share no
memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from chainer_compat.updates import elementwise
from chainer_compat.updates.gradient_memory import gradient_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

#: Like ``id``, but without the audit event that makes ``id`` slow if an audit hook is installed.
identity = object.__hash__

_DTYPES = np.dtype(np.float32), np.dtype(np.float64)
_DTYPES_ON_DEVICES = np.dtype(np.float16), *_DTYPES

#: The attributes that Chainer sets in a rule; ``initial_alpha`` for Adam with ``adabound``.
_ATTRIBUTES = frozenset({'_dummy', '_fp32_param', '_hookable', '_state', '_use_fp32_update',
                         'enabled', 'hyperparam', 'initial_alpha', 't'})


class Member:
    """A parameter that is updated with others: its arrays, as of its last update."""

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
        #: The memory that the update changes; members of a group must not share it.
        self.owners = (identity(rule), *(_owner(array) or 0 for array in (data, *self.states)))
        self.n_attributes = len(vars(rule))
        kind = type(rule), data.dtype.char, (*rule._state,), self.device
        self.kind = id(_kinds.setdefault(kind, kind))
        self.flat = ([] if self.device is not None
                     else [array.reshape(-1) for array in (data, *self.states)])
        self.tensors: Any = None  # PyTorch tensors that share the memory of data and states


#: The kinds of members, so that each kind has one ID.
_kinds: dict[Hashable, Hashable] = {}
_members: weakref.WeakKeyDictionary[Any, Member] = weakref.WeakKeyDictionary()


class ParameterGroup:
    """Parameters with the same kind of rule and hyperparameters."""

    def __init__(self, rule: Any, loss_scale: float | None) -> None:
        self.rule = rule  # the rule of the first member
        self.loss_scale = loss_scale  # None on the CPU
        self.params: list[Any] = []
        self.members: list[Member] = []
        self.grads: list[Array] = []
        #: Whether the members are float32 copies of float16 parameters.
        self.is_of_halves = False


def member_of(param: Any, rule: Any) -> Member | None:
    """Return the member for a parameter; ``None`` if the parameter must be updated alone."""
    grad, hooks = gradient_of(param), rule._hookable
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


def member_of_half(param: Any, rule: Any) -> Member | None:
    """Return the member for the float32 copy of a float16 parameter on a GPU."""
    copy, grad, hooks = rule._fp32_param, gradient_of(param), rule._hookable
    if (copy is None or copy._data[0] is None or not is_plain(param) or 'update' in vars(param)
            or hooks._pre_update_hooks or hooks._post_update_hooks or param._layout is not None
            or not is_number_or_none(param._loss_scale)):
        return None
    member = _current_member(copy, rule)
    if (member is None or not rule.enabled or member.shape != grad.shape
            or member.device != grad.data.device_id):
        return None
    return member


def _current_member(param: Any, rule: Any) -> Member | None:
    """Return the member for the current arrays of a parameter and its rule."""
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
    """Create the member for a parameter, if it can be updated together with others."""
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
    owners = set()
    for array in (data, *rule._state.values()):
        if not (type(array) is type(data) and array.shape == data.shape
                and array.dtype == data.dtype and _is_usable(array, device)):
            return None
        owner = _owner(array)
        if owner is None or owner in owners:
            return None
        owners.add(owner)
    member = _members[rule] = Member(data, rule)
    return member


def _type_on_devices() -> Any:
    """Return the type of CuPy arrays; ``None`` without CuPy."""
    from chainer.backends import cuda

    return cuda.ndarray if cuda.available else None


def _is_usable(array: Array, device: int | None) -> bool:
    """Return whether an array is contiguous, and on a GPU or (``device`` is ``None``) writable."""
    if device is None:
        return array.flags.carray
    return array.flags.c_contiguous and array.data.device_id == device  # type: ignore[attr-defined]


def _owner(array: Array) -> int | None:
    """Return a key that is the same for arrays that may overlap; ``None`` if that is unknown."""
    if isinstance(array, np.ndarray):
        owner = array if array.base is None else array.base
        if not (type(owner) is np.ndarray and owner.flags.owndata):
            return None
    return memory_of(array)


def memory_of(array: Array) -> int:
    """Return ``_owner(array)``, or a key that differs from the owners of all arrays."""
    if type(array) is np.ndarray:
        return identity(array if array.base is None else array.base)
    return elementwise.memory_of(array)


def is_number_or_none(value: Any) -> bool:
    """Return whether a loss scale is a number or ``None``."""
    return value is None or isinstance(value, int | float)


def count_references(rule: Any, name: str) -> int:
    """Return the number of references from this module to a state of a rule."""
    member = _members.get(rule)
    if member is None or not any(array is rule._state[name] for array in member.states):
        return 0
    return 1 + bool(member.flat) + (member.tensors is not None)


def is_plain(param: Any) -> bool:
    """Return whether data and gradient are contiguous CuPy arrays that match.

    They must have the same shape, dtype and device.
    """
    from chainer.variable import Parameter

    if type(param) is not Parameter:
        return False
    data, grad = param._data[0], gradient_of(param)
    return data is not None and type(data) is type(grad) is _type_on_devices() and (
        (data.dtype, data.shape) == (grad.dtype, grad.shape)
        and all(_is_usable(x, data.data.device_id) for x in (data, grad)))
