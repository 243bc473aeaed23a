"""Which parameters of a model were updated together, kept until its next update.

Most updates are like the one before.  A plan has everything that depends on rules, arrays and
classes only; :meth:`Plan.gradients` detects any change since, much faster than a plan is made: it
looks at one attribute of all parameters at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np
from chainer.variable import Parameter

if TYPE_CHECKING:
    from chainer_compat.update_groups import Array, ParameterGroup


class Plan:
    """Parameters on the CPU that are all updated in groups, without hyperparameters of their own.

    It keeps parameters and rules, which know nothing of the model that the plan belongs to.
    """

    def __init__(self, params: Sequence[Any], groups: Sequence[ParameterGroup]) -> None:
        self.groups = [PlannedGroup(group) for group in groups]
        self.parents = [*{id(group.parent): group.parent for group in self.groups}.values()]
        self.types = {group.type for group in self.groups}
        self._params = params
        #: What the update changes; gradients must not share it.
        self._changed = {owner for group in groups for member in group.members
                         for owner in member.owners}

    def gradients(self, params: Sequence[Any]) -> list[list[Array]] | None:
        """Return the gradients of each group; ``None`` if anything else has changed."""
        if len(params) != len(self._params) or not all(map(is_, params, self._params)):
            return None
        found = []
        for group in self.groups:
            gradients = group.gradients() if group.is_unchanged() else None
            if gradients is None or not self._changed.isdisjoint(
                    [id(array if array.base is None else array.base) for array in gradients]):
                return None
            found.append(gradients)
        return found


class Kept:
    """What a kernel keeps for the next update of a group, if that is unchanged."""

    __slots__ = ('gradient_tensors', 'gradients', 'is_small', 'tensors')

    def __init__(self) -> None:
        self.tensors: Any = None  # of data and of each state
        self.is_small = False
        self.gradients: Sequence[Array] = ()  # only small ones, which the program may use again
        self.gradient_tensors: Any = None


class PlannedGroup:
    """Parameters with equal rules, and everything that their update depends on.

    It has no references to states: checkpoints count those (``update_groups.count_references``).
    """

    def __init__(self, group: ParameterGroup) -> None:
        self.members = group.members
        self.rules = [param.update_rule for param in group.params]
        self.type = type(self.rules[0])
        self.parent = self.rules[0].hyperparam.__dict__['_parent']
        self.kept = Kept()
        self._params = group.params
        self._dtype = self.members[0].dtype
        self._shapes = [member.shape for member in self.members]
        self._flags = [member.data.flags.num for member in self.members]
        self._n_attributes = [member.n_attributes for member in self.members]
        #: Members keep the arrays, so that no other has the same number.
        self._data = [id(member.data) for member in self.members]
        self._states = [(name, [id(rule._state[name]) for rule in self.rules])
                        for name in self.rules[0]._state]

    def is_unchanged(self) -> bool:
        """Return whether arrays, rules and hyperparameters are those of the last update."""
        params, rules = self._params, self.rules
        if {*map(type, params)} != {Parameter} or {*map(type, rules)} != {self.type} or not all(
                map(is_, [param.update_rule for param in params], rules)):
            return False
        data = [param._data[0] for param in params]
        hooks = [rule._hookable for rule in rules]
        steps = [rule.t for rule in rules]
        return ([*map(id, data)] == self._data
                and [array.flags.num for array in data] == self._flags
                and [array.shape for array in data] == self._shapes
                and not any([param._loss_scale is not None or param._layout is not None
                             or 'update' in param.__dict__ for param in params])
                and all([rule.enabled for rule in rules])
                and not any([each._pre_update_hooks or each._post_update_hooks for each in hooks])
                and steps.count(steps[0]) == len(steps)
                and [*map(len, map(vars, rules))] == self._n_attributes
                and self._are_hyperparameters_unchanged()
                and self._are_states_unchanged())

    def _are_hyperparameters_unchanged(self) -> bool:
        """Return whether no rule has numbers of its own."""
        own = [rule.hyperparam.__dict__ for rule in self.rules]
        parents = [each.get('_parent', each) for each in own]
        return {*map(len, own)} == {1} and parents.count(self.parent) == len(parents)

    def _are_states_unchanged(self) -> bool:
        states = [rule._state for rule in self.rules]
        if None in states or {*map(len, states)} != {len(self._states)}:
            return False
        return all([[id(state.get(name)) for state in states] == numbers
                    for name, numbers in self._states])

    def gradients(self) -> list[Array] | None:
        """Return the gradients; ``None`` if one is not as usual."""
        gradients = [param._grad for param in self._params]
        n = len(gradients)
        if ([*map(type, gradients)].count(np.ndarray) == n
                and [array.dtype for array in gradients].count(self._dtype) == n
                and [array.shape for array in gradients] == self._shapes
                and all([array.flags.carray for array in gradients])):
            return gradients
        return None
