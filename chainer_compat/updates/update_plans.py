"""Plans: groups of parameters that were updated together, stored for the next update.

Most updates are like the previous one. A plan contains everything that only depends on rules,
arrays and classes. :meth:`Plan.gradients` detects any later change. This is much faster than making
a plan, because it looks at one attribute of all parameters at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from chainer.variable import Parameter

from chainer_compat.updates.update_groups import identity

if TYPE_CHECKING:
    from chainer_compat.updates.update_groups import Array, ParameterGroup


class Plan:
    """Parameters on the CPU, all updated in groups and without per-parameter hyperparameters.

    It refers to their arrays, but to no parameter or rule, which may refer to the model: for
    example, an initializer may be a method of the model.
    """

    def __init__(self, params: Sequence[Any], groups: Sequence[ParameterGroup]) -> None:
        positions = {id(param): i for i, param in enumerate(params)}
        self.groups = [PlannedGroup(group, positions) for group in groups]
        self.parents = [*{id(group.parent): group.parent for group in self.groups}.values()]
        self.types = {group.type for group in self.groups}
        self._n_params = len(params)
        #: The memory that the update changes; gradients must not share it.
        self._changed = {owner for group in groups for member in group.members
                         for owner in member.owners}

    def gradients(self, params: Sequence[Any]) -> list[list[Array]] | None:
        """Return the gradients of each group; ``None`` if anything else has changed."""
        if len(params) != self._n_params:
            return None
        found = []
        for group in self.groups:
            gradients = group.gradients(group.of(params))
            if gradients is None or not self._changed.isdisjoint(
                    [identity(array if array.base is None else array.base)
                     for array in gradients]):
                return None
            found.append(gradients)
        return found


class Kept:
    """The data that a kernel stores for the next update of a group, if the group is unchanged."""

    __slots__ = ('gradient_tensors', 'gradients', 'is_small', 'tensors')

    def __init__(self) -> None:
        self.tensors: Any = None  # the tensors of the data and of each state
        self.is_small = False
        self.gradients: Sequence[Array] = ()  # only small arrays, which may be reused
        self.gradient_tensors: Any = None


class PlannedGroup:
    """Parameters of one group, and everything that their update depends on.

    It has no references to states: checkpoints count these (``update_groups.count_references``).
    """

    def __init__(self, group: ParameterGroup, positions: dict[int, int]) -> None:
        self.members = group.members
        self.type = type(group.rule)
        self.parent = group.rule.hyperparam.__dict__['_parent']
        self.kept = Kept()
        self._positions = [positions[id(param)] for param in group.params]
        self._rules = [weakref.ref(param.update_rule) for param in group.params]
        first, shapes = self.members[0], {member.shape: member.shape for member in self.members}
        self._dtype = first.dtype
        self._data = [member.data for member in self.members]
        self._shapes = [shapes[member.shape] for member in self.members]
        self._n_attributes = first.n_attributes
        self._names = [*group.rule._state]
        self._states = [member.states for member in self.members]

    def of(self, params: Sequence[Any]) -> list[Any]:
        """Return the parameters of this group."""
        return [params[i] for i in self._positions]

    def gradients(self, params: Sequence[Any]) -> list[Array] | None:
        """Return the gradients; ``None`` if one does not fit, or anything else has changed."""
        kind, parent, dtype, array_type = self.type, self.parent, self._dtype, np.ndarray
        n_attributes, n_states = self._n_attributes, len(self._names)
        found, states, first = [], [], self._rules[0]()
        if first is None:
            return None
        step = first.t
        try:
            for param, rule_of_plan, array, shape in zip(
                    params, self._rules, self._data, self._shapes, strict=True):
                attributes = param.__dict__  # twice as fast as attribute access
                rule = rule_of_plan()
                if rule is None:
                    return None
                state = rule._state  # a property, which waits for copies of the state
                of_rule = rule.__dict__
                hyperparam, hooks = of_rule['hyperparam'].__dict__, of_rule['_hookable']
                variable, data = attributes['_grad_var'], attributes['_data'][0]
                grad = attributes['_grad'] if variable is None else variable._data[0]
                if not (type(param) is Parameter and type(rule) is kind
                        and attributes['update_rule'] is rule and 'update' not in attributes
                        and attributes['_loss_scale'] is None and attributes['_layout'] is None
                        and len(of_rule) == n_attributes
                        and of_rule['enabled'] and of_rule['t'] == step
                        and len(hyperparam) == 1 and hyperparam['_parent'] is parent
                        and not hooks._pre_update_hooks and not hooks._post_update_hooks
                        and state is not None and len(state) == n_states
                        and data is array and data.flags.carray
                        and type(grad) is array_type and grad.dtype == dtype
                        and grad.shape == shape and grad.flags.carray):
                    return None
                found.append(grad)
                states.append(state)
            if [*states[0]] != self._names:  # a formula gets arrays in the order of the first rule
                return None
            for i, name in enumerate(self._names):
                if not all([state[name] is arrays[i]
                            for state, arrays in zip(states, self._states, strict=True)]):
                    return None
        except KeyError:  # an attribute or a state was deleted
            return None
        return found
