"""Which parameters of a model were updated together, kept until its next update.

Most updates are like the one before.  A plan has everything that depends on rules, arrays and
classes only; :meth:`Plan.gradients` detects any change since, much faster than a plan is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from chainer_compat.updates import Array, Member, ParameterGroup


class Plan:
    """Parameters on the CPU that are all updated in groups, without hyperparameters of their own.

    It keeps parameters and rules, which know nothing of the model that the plan belongs to.
    """

    def __init__(self, params: Sequence[Any], groups: Sequence[ParameterGroup]) -> None:
        places = {id(param): (member, i) for i, group in enumerate(groups)
                  for param, member in zip(group.params, group.members, strict=True)}
        self.members = [group.members for group in groups]
        self.rules = [[param.update_rule for param in group.params] for group in groups]
        self.entries: list[tuple[Any, Any, Member, Any, int]] = []
        for param in params:
            member, i = places[id(param)]
            rule = param.update_rule
            self.entries.append((param, rule, member, rule.hyperparam.__dict__['_parent'], i))
        self.parents = [*{id(entry[3]): entry[3] for entry in self.entries}.values()]
        #: What the update changes; gradients must not share it.
        self.changed = {owner for group in groups for member in group.members
                        for owner in member.owners}
        self.types = {type(entry[1]) for entry in self.entries}

    def gradients(self, params: Sequence[Any]) -> list[list[Array]] | None:
        """Return the gradients of each group; ``None`` if anything else has changed."""
        if len(params) != len(self.entries):
            return None
        from chainer.variable import Parameter

        _ = self.rules[0][0]._state  # first, a checkpoint may have to copy all states
        found: list[list[Array]] = [[] for _ in self.members]
        steps = [rules[0].t for rules in self.rules]
        changed, array_type = self.changed, np.ndarray
        for param, (expected, rule, member, parent, i) in zip(params, self.entries, strict=True):
            if param is not expected or type(param) is not Parameter:
                return None
            of_param, of_rule = param.__dict__, rule.__dict__
            data, grad, state = of_param['_data'][0], of_param['_grad'], of_rule['_state']
            hooks, own = of_rule['_hookable'], of_rule['hyperparam'].__dict__
            if not (of_param['update_rule'] is rule and data is member.data
                    and type(grad) is array_type and grad.dtype == member.dtype
                    and grad.shape == member.shape == data.shape
                    and grad.flags.carray and data.flags.carray
                    and of_param['_loss_scale'] is None and of_param['_layout'] is None
                    and 'update' not in of_param
                    and of_rule['enabled'] and of_rule['t'] == steps[i]
                    and len(of_rule) == member.n_attributes
                    and not hooks._pre_update_hooks and not hooks._post_update_hooks
                    and len(own) == 1 and own.get('_parent', own) is parent
                    and state is not None and len(state) == len(member.states)):
                return None
            for array, other in zip(state.values(), member.states):  # noqa: B905 (for speed)
                if array is not other:
                    return None
            owner = grad if grad.base is None else grad.base
            if id(owner) in changed:
                return None
            found[i].append(grad)
        return found
